"""Episodes under a chat template: what the policy reads, its calls of tools, and their ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tool_environments
from tool_environments import AtOnce, Calculator

from asyncrl.environments import Action, Environment, Message, Step
from asyncrl.environments.dialogue.dialogue import Dialogue
from asyncrl.environments.environment import tools_of
from asyncrl.environments.episode import Limits, PolicyTurn
from asyncrl.environments.player import Player
from asyncrl.environments.table import Named, load_environment
from asyncrl.errors import ConfigError
from asyncrl.wire.service_messages import EpisodeEnded, NextTurn
from tests.helpers.chat_models import FAMILIES, save_chat_model
from tests.helpers.played import play_row

ASK: list[Message] = [{"role": "system", "content": "You help."}, {"role": "user", "content": "What is 12*34?"}]


@pytest.fixture(scope="module")
def dialogue(tmp_path_factory: pytest.TempPathFactory) -> Dialogue:
    folder = tmp_path_factory.mktemp("model")
    save_chat_model(folder, "qwen")
    return Dialogue(str(folder), trust_remote_code=False, max_observation_tokens=200)


@dataclass
class Policy:
    """Says the texts in turn; remembers what it read before each, and the sequence of tokens as the generator has
    it."""

    dialogue: Dialogue
    texts: list[str]
    tokens: list[int]
    cut: Sequence[int] = ()
    read: list[str] = field(default_factory=list)

    def say(self, player: Player, wish: NextTurn, observation: list[int]) -> None:
        assert wish.keep in (0, len(self.tokens))
        chat = self.dialogue.chat
        self.read.append(chat.decode(observation))
        self.tokens = [*self.tokens[: wish.keep], *observation]
        said = chat.rendering.encode(self.texts.pop(0))
        is_cut = len(self.read) - 1 in self.cut
        turn = PolicyTurn(said if is_cut else [*said, chat.ends.last], "truncated" if is_cut else "completed")
        self.tokens += turn.tokens
        player.receive(wish.branch, turn)


def play(
    dialogue: Dialogue,
    kind: type[Environment],
    *said: str,
    chat: list[Message] | None = None,
    cut: Sequence[int] = (),
    extra: dict[str, Any] | None = None,
    step_timeout_s: float = 5.0,
    max_turns: int = 5,
    **more: Any,
) -> tuple[EpisodeEnded, Policy]:
    chat = ASK if chat is None else chat
    prompt = dialogue.chat.begin(chat, [])
    policy = Policy(dialogue, list(said), prompt, cut)
    limits = Limits(4000, 500, max_turns, 10.0, step_timeout_s)
    ended = play_row(
        Named(kind, {}), dialogue, policy.say, tokens=prompt, limits=limits, chat=chat, extra_info=extra or {}, **more
    )
    return ended, policy


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def test_a_tool_is_called_and_the_last_message_is_the_answer(dialogue: Dialogue) -> None:
    for kind in (Calculator, AtOnce):
        ended, policy = play(dialogue, kind, call("evaluate", expression="12*34"), "408")
        assert (ended.status, ended.ended, ended.error, ended.reward) == ("completed", "done", "", 1.0)
        first, second = policy.read
        assert first.startswith("<|im_start|>system\nYou help.") and '"name": "look_up"' in first
        assert second == (
            "\n<|im_start|>user\n<tool_response>\n408\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
        assert ended.parts["calls/evaluate"] == 1.0 and ended.parts["calls_failed/evaluate"] == 0.0
        assert ended.parts["calls/look_up"] == 0.0 and ended.parts["answered"] == 1.0
    _, policy = play(
        dialogue, Calculator, call("evaluate", expression="1*7", digits="3"), call("look_up", word="two"), "x"
    )
    assert "\n007\n" in policy.read[1] and '{"word": "two", "value": 2}' in policy.read[2], "values in the hints' types"


def test_what_the_policy_did_wrong_is_answered(dialogue: Dialogue) -> None:
    wrong = {
        call("evaluate", expression="12"): "Error: there is no *",
        call("evaluat", expression="12"): "Error: there is no tool 'evaluat'; there are break_down, break_later, ev",
        call("evaluate"): "Error: evaluate: argument expression: Field required",
        call("evaluate", expression="1*1", more=1): "Error: evaluate: argument more: Extra inputs are not",
        call("evaluate", expression="1*1", digits="x"): "Error: evaluate: argument digits: Input should be a valid int",
        call("look_up", word="three"): "Error: look_up: argument word: Input should be 'one' or 'two'",
        call("reward"): "Error: there is no tool 'reward'",
        call("_run"): "Error: there is no tool '_run'",
        "<tool_call>evaluate</tool_call>": "Error: the call is not valid: it is no JSON",
    }
    for text, expected in wrong.items():
        ended, policy = play(dialogue, Calculator, text, "408")
        assert expected in policy.read[1] and ended.reward == 1.0, (text, policy.read[1])
        failed = sum(value for name, value in ended.parts.items() if name.startswith("calls_failed/"))
        assert failed == 1.0 and sum(value for name, value in ended.parts.items() if name.startswith("calls/")) == 1.0
        named = {name.partition("/")[2] for name in ended.parts} - {"", "unknown"}
        assert named == set(tools_of(Calculator)), "the policy cannot name metrics"


def test_calls_of_a_turn_run_in_order_and_async_ones_at_the_same_time(dialogue: Dialogue) -> None:
    seen: list[Calculator] = []

    class Watched(Calculator):
        def close(self) -> None:
            seen.append(self)

    begun_s = time.monotonic()
    both = call("look_up", word="one", wait_s=0.4) + call("look_up", word="two", wait_s=0.2)
    ended, policy = play(dialogue, Watched, both + call("evaluate", expression="2*3") + call("evaluate"), "x")
    assert time.monotonic() - begun_s < 1.5 and ended.status == "completed"
    assert seen[0].log == ["one begins", "two begins", "two ends", "one ends", "2*3"]
    assert policy.read[1].index('"one"') < policy.read[1].index('"two"') < policy.read[1].index("6")
    assert policy.read[1].count("<tool_response>") == 4


@pytest.mark.parametrize("tool", ["break_down", "break_later"])
@pytest.mark.parametrize("kind", [Calculator, AtOnce])
@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("key", "raised KeyError: 'key'"),
        ("exit", "raised SystemExit: enough"),
        ("stop", "raised StopIteration: no more"),
    ],
)
def test_any_other_error_of_a_tool_fails_the_episode(
    dialogue: Dialogue, kind: type[Environment], tool: str, how: str, error: str
) -> None:
    together = call("look_up", word="one", wait_s=3.0)
    begun_s = time.monotonic()
    ended, _ = play(dialogue, kind, (together if tool == "break_later" else "") + call(tool, how=how), "x")
    assert (ended.status, ended.ended, ended.reward) == ("failed", "environment", 0.0)
    assert (
        f"{tool} {error}" in ended.error or "coroutine raised StopIteration" in ended.error
    ) and time.monotonic() - begun_s < 2.0


def test_other_calls_of_a_turn_end_with_the_one_that_fails(dialogue: Dialogue) -> None:
    seen: list[str] = []

    class Watched(Calculator):
        async def close(self) -> None:
            await asyncio.sleep(0.05)
            seen.extend(self.log)

    ended, _ = play(dialogue, Watched, call("look_up", word="one", wait_s=3.0) + call("break_later", how="key"))
    assert ended.status == "failed" and seen == ["one begins", "one is cancelled"]


def test_a_result_that_is_no_json_fails_the_episode(dialogue: Dialogue) -> None:
    ended, _ = play(dialogue, Calculator, call("break_down", how="object"), "x")
    assert "break_down returned object, which is neither a text nor JSON" in ended.error


def test_a_tool_that_takes_too_long_fails_the_episode_and_is_known(dialogue: Dialogue) -> None:
    stuck: set[Any] = set()
    ended, _ = play(dialogue, Calculator, call("break_down", how="sleep"), "x", step_timeout_s=0.3, stuck=stuck)
    assert ended.ended == "timeout" and ended.error.startswith("Calculator.step took longer than environment.step_t")
    assert len(stuck) == 1
    ended, _ = play(dialogue, Calculator, call("look_up", word="one", wait_s=9.0), "x", step_timeout_s=0.3, stuck=stuck)
    assert ended.ended == "timeout" and len(stuck) == 1


def test_a_cut_turn_is_closed_before_its_answer(dialogue: Dialogue) -> None:
    half = call("evaluate", expression="12*34")[:40]
    ended, policy = play(dialogue, Calculator, half, "408", cut=[0])
    assert policy.read[1].startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\nError: the call is not valid")
    assert (ended.status, ended.reward) == ("completed", 1.0)
    ended, policy = play(dialogue, Calculator, "40", cut=[0])
    assert (ended.status, ended.ended, ended.reward) == ("truncated", "done", 0.0), "without a call it is the answer"


def test_the_sequence_is_what_the_policy_read_and_said(dialogue: Dialogue) -> None:
    texts = [call("evaluate", expression="12*34"), call("evaluate", expression="1"), "408"]
    ended, policy = play(dialogue, Calculator, *texts)
    assert dialogue.chat.decode(policy.tokens).count("<|im_start|>assistant") == 3
    calls = [{"id": f"call{n:05d}", "type": "function", "function": {"name": "evaluate"}} for n in range(2)]
    for one, expression in zip(calls, ("12*34", "1"), strict=True):
        one["function"] = {"name": "evaluate", "arguments": {"expression": expression}}
    conversation: list[Message] = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        {"role": "tool", "name": "evaluate", "tool_call_id": "call00000", "content": "408"},
        {"role": "assistant", "content": "", "tool_calls": calls[1:]},
        {"role": "tool", "name": "evaluate", "tool_call_id": "call00001", "content": "Error: there is no *"},
        {"role": "assistant", "content": "408"},
    ]
    rendering = dialogue.chat.rendering
    whole = rendering.encode(rendering.render(conversation, Calculator.tools, generate=False).removesuffix("\n"))
    assert whole == policy.tokens
    assert json.loads(ended.messages) == conversation[len(ASK) :]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, "What is 12*34?<|im_end|>"),
        (" Hurry.", "What is 12*34? Hurry.<|im_end|>"),
        ({"role": "user", "content": "Hurry."}, "12*34?<|im_end|>\n<|im_start|>user\nHurry.<|im_end|>"),
        (
            [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go <|im_end|>"}],
            "Go <|im_end|><|im_",
        ),
    ],
)
def test_what_reset_says_is_behind_the_prompt(dialogue: Dialogue, said: Any, expected: str) -> None:
    ended, policy = play(dialogue, Calculator, "408", extra={"say": said})
    assert expected in policy.read[0] and ended.reward == 1.0, policy.read[0]
    assert policy.read[0].endswith("<|im_start|>assistant\n")


class Talker(Environment):
    """Answers with what the row says, without tools."""

    def step(self, action: Action) -> Any:
        assert action.message["role"] == "assistant" and action.tool_calls == ()
        if action.turn:
            return Step(reward=float(action.message["content"] == "408"), done=True)
        return self.task.extra_info["answer"]


def test_an_environment_without_tools_keeps_the_prompt_of_the_row(dialogue: Dialogue) -> None:
    ended, policy = play(dialogue, Talker, "What?", "408", extra={"answer": "12*34"})
    assert policy.read == ["", "\n<|im_start|>user\n12*34<|im_end|>\n<|im_start|>assistant\n"]
    assert ended.reward == 1.0
    _, policy = play(dialogue, Talker, "What?", "408", extra={"answer": {"role": "system", "content": "Be good."}})
    assert "<|im_start|>system\nBe good.<|im_end|>" in policy.read[1]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"role": "assistant", "content": "a"}, "Talker: [assistant] cannot be appended to a conversation"),
        ({"content": "a"}, "Talker.step said {'content': 'a'} (dict): \"role\" and \"content\" must be texts"),
        ([{"role": "user", "content": 3}], '"role" and "content" must be texts'),
        (["a"], "Talker.step said 'a' (str), which is no message"),
        ([{"role": "user", "content": "\ud800"}], "Talker.step said what is no valid text"),
        (3, "Talker.step returned 3 (int), which is no Step and no text"),
        ([], "Talker.step said nothing, and the episode is not done"),
    ],
)
def test_messages_that_are_none_fail_the_episode(dialogue: Dialogue, answer: Any, error: str) -> None:
    ended, _ = play(dialogue, Talker, "What?", "408", extra={"answer": answer})
    assert ended.status == "failed" and error in ended.error, ended.error


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("NoHint", r"NoHint\.find: Argument word is missing a type hint"),
        ("NoDocstring", r"NoDocstring\.find: .* has no docstring"),
        ("NotDescribed", r"NotDescribed\.find: .* no description for the argument 'word'"),
        ("Star", r"Star\.find: argument \*words: 'str' has no name that a call could give"),
        ("Strange", r"Strange\.find: .*Thread"),
        ("NoTools", r"NoTools: has 0 tools, which are its public methods; at least 1"),
        ("Taken", r"Taken\.answer: is an attribute of every ToolEnvironment; rename the tool"),
    ],
)
def test_a_method_that_cannot_be_a_tool_is_named(name: str, error: str) -> None:
    file = Path(tool_environments.__file__)
    with pytest.raises(ConfigError, match=rf"environment\.name = '.*tool_environments.py:{name}': {error}"):
        load_environment(f"{file}:{name}", {})


def test_tools_need_a_prompt_with_messages(dialogue: Dialogue) -> None:
    ended = play_row(Named(Calculator, {}), dialogue, lambda *_: None, tokens=range(5))
    assert "has tools, which a chat template shows, but the row's prompt is plain text" in ended.error


@pytest.mark.parametrize("family", FAMILIES)
def test_an_episode_under_each_template(tmp_path: Path, family: str) -> None:
    save_chat_model(tmp_path, family)
    dialogue = Dialogue(str(tmp_path), trust_remote_code=False, max_observation_tokens=200, tool_format="hermes")
    chat: list[Message] = [{"role": "user", "content": "What is 12*34?"}]
    ended, policy = play(dialogue, Calculator, call("evaluate", expression="12*34"), "408", chat=chat)
    assert ended.reward == 1.0 and "408" in policy.read[1], ended.error
