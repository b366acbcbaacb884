"""Checks of a chat template with a run's environments, before the run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.config import Config
from asyncrl.environments.dialogue.chat import ChatDialogue
from asyncrl.environments.dialogue.dialogue import Dialogue
from asyncrl.environments.dialogue.plain import DialogueError
from asyncrl.environments.environment import Message, Schema
from asyncrl.errors import ConfigError
from asyncrl.types import Prompt
from asyncrl.util.tokenizer import end_tokens

SENTINEL = "zq7sentinel7qz"
USER: Message = {"role": "user", "content": "Zq7first7qZ"}
TURN: Message = {"role": "assistant", "content": "Zq7turn7qZ"}
NEXT: Message = {"role": "user", "content": "Zq7next7qZ"}
SHOWN_CHARACTERS = 60


def check_chat(config: Config, prompt: Prompt, tools: Mapping[str, Sequence[Schema]]) -> list[str]:
    """Returns what the user should know about the chat template of the run's model. `prompt` is the first, `tools` are
    those of each environment.

    Raises ConfigError if the template cannot be used: it refuses a second turn or does not end one, the engine does not
    stop where it ends one, or it does not show tools.
    """
    where = f"model.path = {config.model.path!r}"
    try:
        dialogue = Dialogue.of(config).chat
        _check_stops(config, dialogue, any(tools.values()))
        for name, schemas in tools.items():
            _check_tools(dialogue, name, schemas)
        notes = [_compared(dialogue, ()), _reasoning(dialogue)]
        notes += [_compared_with_tools(dialogue, schemas) for schemas in tools.values() if schemas]
        notes.append(_first_prompt(dialogue, prompt))
    except DialogueError as error:
        raise ConfigError(f"{where}: {error}; use a model whose template has turns, or prompts of plain text") from None
    return list(dict.fromkeys(note for note in notes if note))


def _check_stops(config: Config, dialogue: ChatDialogue, has_tools: bool) -> None:
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


def _check_tools(dialogue: ChatDialogue, name: str, tools: Sequence[Schema]) -> None:
    """Raises ConfigError if there are tools that the template does not show, or whose calls it cannot show."""
    if not tools:
        return
    function = {"name": SENTINEL, "description": SENTINEL, "parameters": {"type": "object", "properties": {}}}
    shown = dialogue.rendering.render([USER], [{"type": "function", "function": function}], generate=True)
    if SENTINEL not in shown:
        raise ConfigError(
            f"environment.name: {name} has tools, which the model's chat template does not show; use a model whose "
            "template takes tools, or an environment that describes them in its prompts and reads calls itself"
        )
    answer: Message = {"role": "tool", "tool_call_id": "call00000", "name": SENTINEL, "content": "1"}
    dialogue.follow([answer], tools, closed=True)


def _compared(dialogue: ChatDialogue, tools: Sequence[Schema]) -> str:
    """What is different between a second turn that is appended, and the conversation rendered as a whole."""
    rendering = dialogue.rendering
    whole = rendering.render([USER, TURN, NEXT], tools, generate=True)
    end = rendering.name_of(dialogue.ends.history)
    begin = rendering.render([USER], tools, generate=True)
    appended = begin + TURN["content"] + end + dialogue.suffix([NEXT], tools)
    return _difference(dialogue, rendering.plain(appended), rendering.plain(whole))


def _compared_with_tools(dialogue: ChatDialogue, tools: Sequence[Schema]) -> str:
    """The same for the answer to a call. What the policy writes to call a tool is its own."""
    rendering = dialogue.rendering
    arguments = '{"value": 1}' if dialogue.turns.has_text_arguments else {"value": 1}
    function = {"name": SENTINEL, "arguments": arguments}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    call: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    answer: Message = {"role": "tool", "tool_call_id": "call00000", "name": SENTINEL, "content": "1"}
    whole = rendering.plain(rendering.render([USER, call, answer], tools, generate=True))
    begin = rendering.plain(rendering.render([USER], tools, generate=True))
    behind = rendering.plain(dialogue.suffix([answer], tools))
    if not whole.endswith(behind):
        return _difference(dialogue, behind, whole[-len(behind) :])
    return _difference(dialogue, begin, whole[: len(begin)])


def _difference(dialogue: ChatDialogue, appended: str, whole: str) -> str:
    if appended == whole:
        return ""
    place = next((at for at, (a, b) in enumerate(zip(appended, whole, strict=False)) if a != b), 0)
    begin = max(0, place - SHOWN_CHARACTERS // 3)
    first, second = appended[begin : begin + SHOWN_CHARACTERS], whole[begin : begin + SHOWN_CHARACTERS]
    return (
        f"chat template: a further turn is appended to what the policy has read, which then is not what the template "
        f"makes of the conversation: {first!r} instead of {second!r}; with environment.history=template it begins a "
        f"row of its own. {_setting(dialogue)}"
    )


def _reasoning(dialogue: ChatDialogue) -> str:
    """A text if the template does not show the reasoning of earlier turns."""
    reasoning, rendering = "Zq7reason7qZ", dialogue.rendering
    for own in ({"reasoning_content": reasoning}, {"content": f"<think>\n{reasoning}\n</think>\n\nZq7turn7qZ"}):
        turn = {**TURN, **own}
        if reasoning in rendering.render([USER, turn], (), generate=False):
            if reasoning in rendering.render([USER, turn, NEXT], (), generate=True):
                return ""
            return (
                "chat template: it leaves out the reasoning of earlier turns. With environment.history=keep the policy "
                "continues to read it in an episode, other than behind a server that renders the conversation; with "
                "environment.history=template it reads what the template renders, and a turn before which reasoning "
                f"is left out begins a row of its own, so that more tokens are computed. {_setting(dialogue)}"
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
