"""What the policy reads of its earlier turns: all that it said, or what the chat template renders
(`environment.history`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from asyncrl.environments import Environment, Message, Step
from asyncrl.environments.dialogue.conversation import note_refusal
from asyncrl.environments.dialogue.dialogue import MARK, ChatDialogue, Dialogue
from asyncrl.environments.episode import Limits, PolicyTurn
from asyncrl.environments.gateway.openai_api import chat_request
from asyncrl.environments.gateway.session import Session
from asyncrl.environments.table import Named
from asyncrl.wire.service_messages import EpisodeEnded, NextTurn
from tests.helpers.chat_models import FAMILIES, OPENING, QWEN, TEXT_ARGUMENTS, THINKING, save_chat_model
from tests.helpers.dialogues import Branches
from tests.helpers.played import play_row

ASK: list[Message] = [{"role": "system", "content": "You help."}, {"role": "user", "content": "What is 12*34?"}]
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "evaluate", "description": "Value.", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "evaluate", "arguments": {"expression": "12*34"}}\n</tool_call>'
COMPACT = CALL.replace(": ", ":").replace(", ", ",")
THOUGHTFUL = [
    f"<think>\nUse it.\n</think>\n\nLet me see.\n{CALL}",
    "<think>\nSo it is.\n</think>\n\nIt is 408.",
    f"<think>\nAgain.\n</think>\n\n{CALL}",
    "Still the same.",
    "<think>\nEnough.\n</think>\n\nBye.",
]
"""Two calls are answered by the tool, two turns by the user."""
CALLS = {
    "qwen": CALL,
    "llama": '{"name": "evaluate", "parameters": {"expression": "12*34"}}',
    "mistral": '[TOOL_CALLS][{"name": "evaluate", "arguments": {"expression": "12*34"}, "id": "call00000"}]',
}


class Desk(Environment):
    """Answers a call with a number of digits, and other turns with a question."""

    tools = (TOOL,)
    max_turns, returns_at_once = 5, True

    def __init__(self, task: Any, *, digits: int = 3) -> None:
        super().__init__(task)
        self.digits = digits

    def step(self, action: Any) -> Any:
        calls = list(action.tool_calls)
        action.message.clear()  # is the environment's own
        if calls:
            made = [{"role": "tool", "tool_call_id": call.id, "name": call.name} for call in calls]
            return [one | {"content": "4" * self.digits} for one in made]
        return Step(f"Question {action.turn}?", reward=0.5, done=action.turn == 4)


class Policy(Branches):
    """Says the texts in turn, each character in a token of its own."""

    def __init__(self, dialogue: ChatDialogue, texts: Sequence[str], prompt: Sequence[int] = ()) -> None:
        super().__init__(list(prompt))
        self.dialogue, self.texts = dialogue, texts

    def turn(self, wish: NextTurn, observation: Sequence[int]) -> PolicyTurn:
        text = self.texts[len(self.said)]
        said = characters(self.dialogue, text.removesuffix("~"))
        said = said if text.endswith("~") else [*said, self.dialogue.ends.last]
        self.add(wish, observation, said)
        return PolicyTurn(said, "truncated" if text.endswith("~") else "completed")


def characters(dialogue: ChatDialogue, text: str) -> list[int]:
    """Tokens in which the text is sampled, but not encoded."""
    special, at = dialogue.rendering.special_tokens, 0
    tokens: list[int] = []
    while at < len(text):
        name = next((name for name in special if text.startswith(name, at)), None)
        tokens += dialogue.coders.encode(text[at]) if name is None else [special[name]]
        at += 1 if name is None else len(name)
    return tokens


def load(folder: Path, history: str, *, limit: int = 500) -> Dialogue:
    return Dialogue(str(folder), trust_remote_code=False, max_observation_tokens=limit, history=history)


def play(
    dialogue: Dialogue, *texts: str, chat: Sequence[Message] = ASK, window: int = 2000, **options: Any
) -> tuple[EpisodeEnded, Policy]:
    policy = Policy(dialogue.chat, texts, dialogue.chat.begin(chat, []))
    ended = play_row(
        Named(Desk, options),
        dialogue,
        lambda player, wish, tokens: player.receive(wish.branch, policy.turn(wish, tokens)),
        tokens=policy.prompt,
        limits=Limits(window, 300, 5, 10.0, 5.0),
        chat=list(chat),
    )
    assert ended.error == "", ended.error
    return ended, policy


def conversations(policy: Policy, *, are_texts: bool = False, digits: int = 3) -> list[list[Message]]:
    """The messages before each turn of a policy at a Desk."""
    messages, before, calls = list(ASK), list[list[Message]](), 0
    for number, tokens in enumerate(policy.said):
        before.append(list(messages))
        read = policy.dialogue.read(tokens, [TOOL], first_call=calls)
        calls += len(read.calls)
        message = json.loads(json.dumps(read.message))
        for call in message.get("tool_calls", []) if are_texts else []:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        said: list[Message] = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "4" * digits} for call in read.calls
        ]
        messages += [message, *(said or [{"role": "user", "content": f"Question {number}?"}])]
    return before


def check_prompts(folder: Path, policy: Policy, **options: Any) -> None:
    """Every prompt is the rendering of the messages by transformers alone."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    for messages, prompt in zip(conversations(policy, **options), policy.prompts, strict=True):
        text = tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(prompt) == text


def check_trained_once(policy: Policy) -> None:
    """Each turn is trained in one branch, and what a branch begins with is context."""
    for wish, prompt, said in zip(policy.wishes, policy.prompts, policy.said, strict=True):
        assert policy.branches[wish.branch][len(prompt) : len(prompt) + len(said)] == said


def runs(tokens: Sequence[int], part: Sequence[int]) -> int:
    """How often a part is in the tokens."""
    return sum(tokens[at : at + len(part)] == list(part) for at in range(len(tokens)))


@pytest.mark.parametrize("template", [THINKING, OPENING, TEXT_ARGUMENTS], ids=["thinking", "opening", "arguments"])
def test_prompts_are_the_renderings_of_a_template_that_strips_reasoning(tmp_path: Path, template: str) -> None:
    save_chat_model(tmp_path, template=template)
    opening = template == OPENING
    texts = [text.removeprefix("<think>\n") for text in THOUGHTFUL] if opening else THOUGHTFUL
    texts[3:4] = [f"Hm.\n</think>\n\n{texts[3]}"] if opening else texts[3:4]
    ended, policy = play(load(tmp_path, "template"), *texts)
    assert (ended.ended, ended.turn_rewards) == ("done", [0.0, 0.5, 0.0, 0.5, 0.5])
    check_prompts(tmp_path, policy, are_texts=template == TEXT_ARGUMENTS)
    check_trained_once(policy)
    assert [(wish.branch, wish.source) for wish in policy.wishes] == [(0, 0), (0, 0), (1, 0), (1, 1), (2, 1)], (
        "a tool loop continues its branch, a question of the user begins a new one"
    )
    chat = policy.dialogue
    first, second = characters(chat, f"Let me see.\n{CALL}"), characters(chat, "It is 408.")
    assert [runs(prompt, first) for prompt in policy.prompts] == [0, 1, 1, 1, 1]
    assert [runs(prompt, second) for prompt in policy.prompts] == [0, 0, 1, 1, 1]
    # all but the policy's own words is encoded as the tokenizer does
    start = [chat.rendering.special_tokens["<|im_start|>"], *chat.coders.encode("assistant\n")]
    last = policy.prompts[4]
    assert runs(last, [*start, *first, chat.ends.last]) == runs(last, [*start, *second, chat.ends.last]) == 1
    kept = [wish.keep for wish in policy.wishes if wish.branch]
    assert policy.branches[0][: kept[0]] == policy.branches[1][: kept[0]] and kept[0] >= len(policy.prompts[0]) - 3


def test_a_turn_that_the_row_begins_is_one_message(tmp_path: Path) -> None:
    save_chat_model(tmp_path)
    begun = [*ASK, {"role": "assistant", "content": "So: "}]
    _, policy = play(load(tmp_path, "template"), f"Let me see.\n{CALL}", *["It is 408."] * 4, chat=begun)
    texts = [policy.dialogue.decode(prompt) for prompt in policy.prompts]
    assert texts[0].endswith("<|im_start|>assistant\nSo: ")
    assert f"<|im_start|>assistant\nSo: Let me see.\n{CALL}<|im_end|>\n" in texts[1]
    assert texts[1].count("<|im_start|>assistant") == 2
    check_trained_once(policy)
    assert not any(wish.branch for wish in policy.wishes), "each prompt continues the first"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_that_strips_nothing_makes_the_branch_of_appended_turns(tmp_path: Path, family: str) -> None:
    save_chat_model(tmp_path, family)
    texts = [CALLS[family], "It is 408.", "Yes: {1, 2}", "ünï ✓~", "Bye."]
    if family == "qwen":
        texts[:3] = [*THOUGHTFUL[:2], f"Two.\n{CALL}\n{CALL}"]
    if family == "mistral":
        texts[3] = CALLS[family].replace("00000", "00001")
    chat = ASK[1:] if family == "mistral" else ASK  # which has no role for the system
    for digits in (3, 400):
        both = [
            play(load(tmp_path, history, limit=60), *texts, chat=chat, digits=digits)
            for history in ("keep", "template")
        ]
        (_, kept), (_, rendered) = both
        assert kept.wishes == rendered.wishes and {wish.branch for wish in kept.wishes} == {0}
        assert kept.prompts == rendered.prompts and kept.branches == rendered.branches
        assert (MARK.strip() in kept.dialogue.decode(kept.branches[0])) == (digits == 400)


@pytest.mark.parametrize(
    ("text", "branches"),
    [
        (COMPACT, [0, 1, 1, 1]),  # the template writes arguments with spaces
        (f"<think>\n\nHm.\n</think>\n{CALL}", [0, 1, 1, 1]),
        ("a<|im_start|>b", [0, 1, 1, 1]),  # no special token is in a content
        ("<think>\nHm~", [0, 1, 1, 1]),
        ("", [0, 0, 0, 0]),
    ],
)
def test_a_turn_that_is_written_in_another_way_is_context(tmp_path: Path, text: str, branches: list[int]) -> None:
    save_chat_model(tmp_path)
    _, policy = play(load(tmp_path, "template"), text, "One.", "Two.", "Three.", "Four.")
    check_prompts(tmp_path, policy)
    check_trained_once(policy)
    assert [wish.branch for wish in policy.wishes][:4] == branches
    assert runs(policy.prompts[3], characters(policy.dialogue, "One.")) == 1


def test_a_conversation_that_the_template_refuses_is_appended_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_chat_model(tmp_path, "llama")
    note_refusal.cache_clear()
    texts = [f"[{CALLS['llama']}, {CALLS['llama']}]", "It is 408.", "One.", "Two.", "Three."]
    (_, kept), (_, rendered) = (play(load(tmp_path, history), *texts) for history in ("keep", "template"))
    assert kept.prompts == rendered.prompts and kept.wishes == rendered.wishes
    assert capsys.readouterr().out.count("one tool call at a time") == 1


async def talk(dialogue: ChatDialogue, policy: Policy, *, drops: bool, questions: int) -> Session:
    """A client that asks questions, and sends back what the policy said, with its reasoning unless it `drops` it."""

    def say(wish: NextTurn, tokens: list[int]) -> None:
        turn = policy.turn(wish, tokens)
        asyncio.get_running_loop().call_soon(session.receive, wish.branch, turn)

    session = Session("7.0.1", dialogue, Limits(2000, 300, 8, 10.0, 10.0), say)
    messages = list(ASK)
    for number in range(questions):
        body = {"messages": messages}
        answer = await session.complete(chat_request(body, json.dumps(body).encode(), {}, {}))
        session.delivered(answer)
        message = dict(answer.message)
        if drops:
            message.pop("reasoning_content", None)
        messages = [*messages, message, {"role": "user", "content": f"Question {number}?"}]
    return session


@pytest.mark.parametrize(
    ("template", "drops", "branches"),
    [
        (QWEN, True, [0, 1, 1, 2]),
        (QWEN, False, [0, 0, 0, 0]),
        (THINKING, True, [0, 1, 1, 2]),
        (THINKING, False, [0, 1, 1, 2]),
    ],
)
def test_a_session_reads_the_messages_of_its_client(
    tmp_path: Path, template: str, drops: bool, branches: list[int]
) -> None:
    save_chat_model(tmp_path, template=template)
    texts = ["<think>\nOne.\n</think>\n\nYes.", "No.", "<think>\nTwo.\n</think>\n\nTwo it is.", "Bye."]
    chat = load(tmp_path, "template").chat
    policy = Policy(chat, texts)
    session = asyncio.run(talk(chat, policy, drops=drops, questions=4))
    assert [wish.branch for wish in policy.wishes] == branches and session.close() == []
    check_trained_once(policy)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages = list(ASK)
    for number, (said, prompt) in enumerate(zip(policy.said, policy.prompts, strict=True)):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(prompt) == text
        message = chat.read(said, ()).message
        message = {name: value for name, value in message.items() if name != "reasoning_content" or not drops}
        messages += [message, {"role": "user", "content": f"Question {number}?"}]
    for answer in ("Yes.", "No.", "Two it is."):
        assert runs(policy.prompts[3], characters(chat, answer)) == 1
    kept = load(tmp_path, "keep").chat
    appended = Policy(kept, texts)
    asyncio.run(talk(kept, appended, drops=drops, questions=4))
    assert {wish.branch for wish in appended.wishes} == {0}
