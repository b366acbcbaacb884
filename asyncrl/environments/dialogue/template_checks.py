"""Checks of a chat template with a run's environments, before the run starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config.config import Config
from asyncrl.environments.dialogue.dialogue import ChatDialogue, Dialogue
from asyncrl.environments.dialogue.formats import END_THINK, FORMATS, THINK
from asyncrl.environments.dialogue.rendering import DialogueError
from asyncrl.environments.environment import Message, Schema
from asyncrl.errors import ConfigError
from asyncrl.types import Prompt
from asyncrl.util.model_files import end_tokens

SENTINEL = "zq7sentinel7qz"
USER: Message = {"role": "user", "content": "Zq7first7qZ"}
TURN: Message = {"role": "assistant", "content": "Zq7turn7qZ"}
NEXT: Message = {"role": "user", "content": "Zq7next7qZ"}
SHOWN_CHARACTERS = 60


def check_chat(config: Config, prompt: Prompt, tools: Mapping[str, Sequence[Schema]]) -> list[str]:
    """Returns what the user should know about the chat template of the run's model. `prompt` is the first, `tools` are
    the tools of each environment.

    Raises ConfigError if the template cannot be used: it refuses a second turn or does not end one, the engine does not
    stop where it ends one, or it does not show tools.
    """
    where = f"model.path = {config.model.path!r}"
    try:
        dialogue = Dialogue.of(config).chat_for(prompt.columns)
        check_stops(config, dialogue, has_tools=any(tools.values()))
        for name, schemas in tools.items():
            _check_tools(config, dialogue, name, schemas)
        notes = [_compared(dialogue), _reasoning(dialogue), _first_prompt(dialogue, prompt)]
    except DialogueError as error:
        raise ConfigError(f"{where}: {error}; use a model whose template has turns, or prompts of plain text") from None
    return [note for note in notes if note]


def check_stops(config: Config, dialogue: ChatDialogue, *, has_tools: bool) -> None:
    """Raises ConfigError unless the engine stops at the tokens with which the template ends a turn."""
    stops = end_tokens(config.model.path, trust_remote_code=config.model.trust_remote_code)
    rendering = dialogue.rendering
    texts = {token: text for text, token in rendering.special_tokens.items()}
    for token in {dialogue.ends.last, dialogue.ends.call if has_tools else None} - {None, *stops}:
        assert token is not None
        text = texts[token]
        if any(stop in text for stop in config.generator.stop_texts):
            continue
        known = ", ".join(f"{texts.get(stop, '')} ({stop})".strip() for stop in stops) or "none"
        raise ConfigError(
            f"model.path = {config.model.path!r}: its chat template ends a turn with {text} ({token}), but the engine "
            f"stops at {known}; set generator.stop='{text}', or add {token} to eos_token_id in generation_config.json"
        )


def _check_tools(config: Config, dialogue: ChatDialogue, name: str, tools: Sequence[Schema]) -> None:
    """Raises ConfigError if there are tools that the template does not show, whose calls it cannot show, or whose calls
    are not read as it shows them."""
    if not tools:
        return
    parameters = {"type": "object", "properties": {"key": {"type": "string"}, "count": {"type": "integer"}}}
    function = {"name": SENTINEL, "description": SENTINEL, "parameters": parameters}
    tool: Schema = {"type": "function", "function": function}
    shown = dialogue.rendering.render([USER], [tool], generate=True)
    if SENTINEL not in shown:
        raise ConfigError(
            f"environment.name: {name} has tools, which the model's chat template does not show; use a model whose "
            "template takes tools, or an environment that describes them in its prompts and reads calls itself"
        )
    answer: Message = {"role": "tool", "tool_call_id": "call00000", "name": SENTINEL, "content": "1"}
    dialogue.follow([answer], tools, closed=True)
    arguments = {"key": "x", "count": 3}
    turn = call_turn(dialogue, tool, arguments)
    calls = [(call.name, call.arguments) for call in dialogue.read(dialogue.rendering.encode(turn), [tool]).calls]
    if calls != [(SENTINEL, arguments)] and config.environment.tool_format != "none":
        written = dialogue.rendering.plain(turn).replace(SENTINEL, "NAME")
        formats = ", ".join(FORMATS)
        raise ConfigError(
            f"environment.name: {name} has tools, but a call is not read as the model's chat template writes it "
            f"({written!r}): set environment.tool_format to the form in which the model writes calls ({formats}), or "
            f"give its tokenizer a response_template; environment.tool_format is {config.environment.tool_format}"
        )


def call_turn(dialogue: ChatDialogue, tool: Schema, arguments: dict[str, Any]) -> str:
    """Returns the turn with a call of the tool as the template writes it, with the names of special tokens, without the
    token that ends it."""
    rendering = dialogue.rendering
    text = json.dumps(arguments) if dialogue.turns.has_text_arguments else arguments
    call = {"id": "call00000", "type": "function", "function": {"name": tool["function"]["name"], "arguments": text}}
    spoken: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    before, prompt = (rendering.render([USER], [tool], generate=generate) for generate in (False, True))
    turn = rendering.render([USER, spoken], [tool], generate=False)
    # Templates leave the reasoning out of earlier turns, also where their generation prompt writes its tags.
    think = rendering.name_of(rendering.special_tokens[THINK]) if THINK in rendering.special_tokens else THINK
    header = prompt if turn.startswith(prompt) else prompt.partition(think)[0]
    turn = turn.removeprefix(header if turn.startswith(header) else before)
    if dialogue.opens_reasoning and END_THINK not in turn:
        turn = f"{END_THINK}\n\n{turn}"
    ends = [position for token, position in rendering.special_in(turn) if token in dialogue.end_tokens]
    return turn[: ends[-1]] if ends else turn


def _compared(dialogue: ChatDialogue) -> str:
    """A text if an appended second turn differs from the rendering of the complete conversation."""
    rendering = dialogue.rendering
    complete = rendering.plain(rendering.render([USER, TURN, NEXT], (), generate=True))
    begin, end = rendering.render([USER], (), generate=True), rendering.name_of(dialogue.ends.history)
    appended = rendering.plain(begin + TURN["content"] + end + dialogue.suffix([NEXT], ()))
    if appended == complete:
        return ""
    differ = next((at for at, (a, b) in enumerate(zip(appended, complete, strict=False)) if a != b), 0)
    shown = slice(max(0, differ - SHOWN_CHARACTERS // 3), differ + 2 * SHOWN_CHARACTERS // 3)
    return (
        f"chat template: a further turn is appended to what the policy has read, which then is not what the template "
        f"makes of the conversation: {appended[shown]!r} instead of {complete[shown]!r}; with "
        f"environment.history=template it begins a row of its own. {_setting(dialogue)}"
    )


def _reasoning(dialogue: ChatDialogue) -> str:
    """A text if the template does not show the reasoning of earlier turns."""
    reasoning, rendering = "Zq7reason7qZ", dialogue.rendering
    for fields in ({"reasoning_content": reasoning}, {"content": f"<think>\n{reasoning}\n</think>\n\nZq7turn7qZ"}):
        turn = {**TURN, **fields}
        if reasoning in rendering.render([USER, turn], (), generate=False):
            if reasoning in rendering.render([USER, turn, NEXT], (), generate=True):
                return ""
            return (
                "chat template: it leaves out the reasoning of earlier turns. With environment.history=keep the policy "
                "continues to read it in an episode; with environment.history=template it reads what the template "
                f"renders, and a turn before which reasoning is left out begins a row of its own. {_setting(dialogue)}"
            )
    return ""


def _setting(dialogue: ChatDialogue) -> str:
    """Which value of `environment.history` holds."""
    return f"Set is {'template' if dialogue.renders_history else 'keep'}."


def _first_prompt(dialogue: ChatDialogue, prompt: Prompt) -> str:
    """A text if the messages of a prompt have other tokens than the prompt."""
    if prompt.chat is None or dialogue.begin(prompt.chat, ()) == prompt.tokens.tolist():
        return ""
    return (
        f"row {prompt.row}: with an environment its prompt has other tokens than without; it is cut at the limit of "
        "prompts, has the text of special tokens in a message, or the tokenizer's class does not split text as its "
        "tokenizer.json does"
    )
