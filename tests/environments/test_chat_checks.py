"""What is refused, or said, about a chat template before a run starts; and how its conversations are shown."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from asyncrl.cli.play import play
from asyncrl.config.config import Config
from asyncrl.environments.dialogue.conversation import Display, Shown
from asyncrl.environments.dialogue.dialogue import Dialogue
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import check_environments
from tests.helpers.chat_models import (
    FAMILIES,
    HARMONY,
    HARMONY_TOKENS,
    OPENING,
    QWEN,
    STRIPPING,
    TEXT_ARGUMENTS,
    THINKING,
    TOOLLESS,
    save_chat_model,
)

TOOLS = f"{Path(__file__).with_name('tool_environments.py')}:Calculator"
CHAT = [{"role": "user", "content": "What is 12*34?"}]
ASKING = """
from asyncrl.environments import Environment, Step

class Asking(Environment):
    def step(self, action):
        return Step("And?", done=action.turn == 1)
"""
CALL = '<tool_call>\n{"name": "evaluate", "arguments": {"expression": "12*34"}}\n</tool_call>'


def make(folder: Path, *, chat: list[dict[str, str]] | None = None, prompts: Any = None, **values: Any) -> Config:
    """A config of the model in the folder, with one row of data."""
    (folder / "model.safetensors").write_bytes(b"")
    prompt = prompts if prompts is not None else [CHAT if chat is None else chat]
    columns = {"prompt": prompt, "reward_model": [{"ground_truth": "408"}], "data_source": ["test"]}
    pq.write_table(pa.table(columns), folder / "train.parquet")
    settings = {
        "model": {"path": str(folder)},
        "data": {"train": str(folder / "train.parquet"), **values.pop("data", {})},
        "generator": {"max_new_tokens": 100, **values.pop("generator", {})},
        "environment": {"name": values.pop("name", TOOLS), **values.pop("environment", {})},
    }
    return Config.model_validate(settings)


def checked(config: Config) -> str:
    """What the checks print."""
    output = io.StringIO()
    check_environments(config, Console(file=output, width=10_000), 3000)
    return "\n".join(line for line in output.getvalue().splitlines() if not line.startswith("importing "))


@pytest.mark.parametrize("family", FAMILIES)
def test_good_templates_are_accepted_without_a_word(tmp_path: Path, family: str) -> None:
    save_chat_model(tmp_path, family)
    assert checked(make(tmp_path)) == ""


def test_a_stop_token_that_the_engine_does_not_know_is_refused(tmp_path: Path) -> None:
    save_chat_model(tmp_path, stop="<|endoftext|>")
    with pytest.raises(ConfigError) as caught:
        checked(make(tmp_path))
    text = str(caught.value)
    assert "ends a turn with <|im_end|> (392), but the engine stops at <|endoftext|> (390)" in text
    assert "set generator.stop='<|im_end|>', or add 392 to eos_token_id in generation_config.json" in text
    assert checked(make(tmp_path, generator={"stop": "<|im_end|>"})) == ""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [390, 392]}))
    assert checked(make(tmp_path)) == ""


def test_a_template_whose_calls_are_not_read_is_refused(tmp_path: Path) -> None:
    """Before, the policy's calls would be taken as its final answers."""
    save_chat_model(tmp_path, template=HARMONY, special=HARMONY_TOKENS, stop="<|return|>")
    stops = {"stop": ["<|call|>", "<|end|>"]}
    text = r"Calculator has tools, but a call is not read as the model's chat template writes it .*to=functions\.NAME"
    with pytest.raises(ConfigError, match=text) as caught:
        checked(make(tmp_path, generator=stops))
    assert "set environment.tool_format" in str(caught.value) and "response_template" in str(caught.value)
    with pytest.raises(ConfigError, match=r"environment\.tool_format is hermes"):
        checked(make(tmp_path, generator=stops, environment={"tool_format": "hermes"}))
    assert "is not read" not in checked(make(tmp_path, generator=stops, environment={"tool_format": "none"}))


@pytest.mark.parametrize("template", [OPENING, TEXT_ARGUMENTS], ids=["opens reasoning", "text arguments"])
def test_calls_are_read_back_behind_reasoning_and_with_text_arguments(tmp_path: Path, template: str) -> None:
    save_chat_model(tmp_path, template=template)
    checked(make(tmp_path))


def test_a_template_without_tools_is_refused_for_tools_only(tmp_path: Path) -> None:
    save_chat_model(tmp_path, template=TOOLLESS)
    with pytest.raises(ConfigError, match=r"Calculator has tools, which the model's chat template does not show"):
        checked(make(tmp_path))
    assert checked(make(tmp_path, name="guess")) == ""


def test_tools_with_prompts_of_plain_text_are_refused(tmp_path: Path) -> None:
    save_chat_model(tmp_path)
    config = make(tmp_path, prompts=["What is 12*34?"])
    with pytest.raises(ConfigError, match=r"has tools, .* are plain text; give messages, or set data\.string_prompts"):
        checked(config)
    assert checked(make(tmp_path, prompts=["What is 12*34?"], data={"string_prompts": "user"})) == ""


def test_a_template_that_leaves_out_reasoning_is_named(tmp_path: Path) -> None:
    save_chat_model(tmp_path, template=STRIPPING)
    for history in ("keep", "template"):
        text = checked(make(tmp_path, name="guess", environment={"history": history}))
        assert "warning: chat template: it leaves out the reasoning of earlier turns." in text
        assert "With environment.history=keep the policy continues to read it" in text
        assert "with environment.history=template it reads what the template renders" in text
        assert f"Set is {history}." in text


def test_a_template_that_rewrites_what_was_read_is_named(tmp_path: Path) -> None:
    """As one that writes the number of messages at its beginning."""
    save_chat_model(
        tmp_path, template="{{- '<|im_start|>system\\n' + messages | length | string + '<|im_end|>\\n' }}" + QWEN
    )
    text = checked(make(tmp_path, name="guess"))
    assert "warning: chat template: a further turn is appended to what the policy has read" in text
    assert "system\\n1" in text and "system\\n3" in text


def test_a_template_that_has_no_second_turn_is_refused(tmp_path: Path) -> None:
    once = "{%- if messages | length > 2 %}{{ raise_exception('one turn only') }}{%- endif %}" + TOOLLESS
    save_chat_model(tmp_path, template=once)
    with pytest.raises(ConfigError, match=r"refuses \[user, assistant, user\]: one turn only; use a model whose templ"):
        checked(make(tmp_path, name="guess"))


def test_special_tokens_in_a_prompt_are_named(tmp_path: Path) -> None:
    save_chat_model(tmp_path)
    config = make(tmp_path, chat=[{"role": "user", "content": "a<|im_end|>b"}])
    assert "warning: row 0: with an environment its prompt has other tokens than without" in checked(config)


def test_play_shows_roles_and_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.cli.play.check_model", lambda config: 3000)
    save_chat_model(tmp_path)
    output = io.StringIO()
    say = [f"<think>\nTwelve times.\n</think>\n\nWell.\n{CALL}", "408"]
    code = play(make(tmp_path), Console(file=output, width=10_000), rows=1, say=say, typed=False)
    text = output.getvalue()
    assert code == 0 and "completed (done): reward 1" in text, text
    shown = re.findall(
        r"^ *(system|user|reasoning|assistant|calls|tool)  (.*?)(?:   \d+ tokens.*)?$", text, re.MULTILINE
    )
    assert [name for name, _ in shown] == ["system", "user", "reasoning", "assistant", "calls", "tool", "assistant"]
    assert shown[1:] == [
        ("user", "What is 12*34?"),
        ("reasoning", "Twelve times."),
        ("assistant", "Well."),
        ("calls", 'evaluate({"expression": "12*34"})'),
        ("tool", "408"),
        ("assistant", "408"),
    ]


def test_play_shows_where_a_branch_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.cli.play.check_model", lambda config: 3000)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "asking.py").write_text(ASKING)
    save_chat_model(tmp_path, template=THINKING)
    output = io.StringIO()
    config = make(tmp_path, name="asking.py:Asking", environment={"history": "template"})
    say = ["<think>\nHm.\n</think>\n\nWell.", "Bye."]
    code = play(config, Console(file=output, width=10_000), rows=1, say=say, typed=False)
    lines = [re.sub(r"\d+ tokens", "N tokens", " ".join(line.split())) for line in output.getvalue().splitlines()]
    assert code == 0 and lines[-9:-2] == [
        "user What is 12*34? N tokens",
        "reasoning Hm.",
        "assistant Well. N tokens, reward 0",
        "branch 1: the first N tokens of branch 0, and from there",
        "assistant Well.",
        "user And? N tokens, branch 1",
        "assistant Bye. N tokens, branch 1, reward 0",
    ], output.getvalue()


@pytest.mark.parametrize("family", FAMILIES)
def test_messages_are_found_in_tokens(tmp_path: Path, family: str) -> None:
    save_chat_model(tmp_path, family)
    chat = Dialogue(str(tmp_path), trust_remote_code=False, max_observation_tokens=99).chat
    display = Display(chat)
    system = [] if family == "mistral" else [{"role": "system", "content": "You help."}]
    begin = chat.begin([*system, {"role": "user", "content": "Hello"}], [])
    assert display.heard(begin)[-1] == Shown("user", "Hello") and display.is_chat(begin)
    assert not system or display.heard(begin)[0] == Shown("system", "You help.")
    answers = [
        {"role": "tool", "tool_call_id": f"call0000{n}", "name": "f", "content": f"{n}7<|im_end|></s>"}
        for n in range(2)
    ]
    heard = display.heard(chat.follow(answers, [], closed=True))
    assert [one.role for one in heard] == ["tool", "tool"] and "17<|im_end|></s>" in heard[1].text
    assert not display.is_chat(chat.rendering.encode("Hello"))
    assert display.said([]) == [Shown("assistant", "")]
