"""Chats and texts as tokens, verl's schema from end to end, and the prompts of an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from asyncrl.config import Config
from asyncrl.data.cursor import PromptCursor
from asyncrl.data.parquet import check_dataset, write_rows
from asyncrl.data.prompts import eval_prompts
from asyncrl.errors import ConfigError, DataError
from tests.data.conftest import row

Write = Callable[..., Config]


def test_verls_schema_goes_through_unchanged(dataset: Write, chat_folder: Path) -> None:
    chat = [{"role": "system", "content": "0"}, {"role": "user", "content": "1+2"}]
    extra = {"index": 7, "split": "train", "answer": "3", "tools": {"sum": {"create": [1.5, 2.5]}}, "need": True}
    verl = {
        "data_source": "openai/gsm8k",
        "prompt": chat,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": extra,
    }
    config = dataset([verl, verl | {"extra_info": {"index": 8, "interaction": {"name": "ask"}}}], data__shuffle=False)
    assert check_dataset(config) == 2
    cursor = PromptCursor(config, limit_tokens=20)
    first, second = next(cursor), next(cursor)
    assert first.tokens.tolist() == [3, 4, 13, 5, 16]
    assert (first.ground_truth, first.data_source) == ("3", "openai/gsm8k")
    assert first.extra_info == extra
    assert second.extra_info == {"index": 8, "interaction": {"name": "ask"}}
    assert first.chat == chat
    assert first.columns == {"ability": "math"}
    for value in (first.chat, first.extra_info, first.columns):
        assert msgpack.unpackb(msgpack.packb(value)) == value


def test_a_string_is_the_text_or_what_a_user_says(dataset: Write, chat_folder: Path) -> None:
    text = next(PromptCursor(dataset([row(12)]), limit_tokens=10))
    assert (text.tokens.tolist(), text.chat) == ([3, 4, 5, 16], None)
    said = next(PromptCursor(dataset([row(12)], data__string_prompts="user"), limit_tokens=10))
    assert (said.tokens.tolist(), said.chat) == ([3, 4, 5, 16, 16], [{"role": "user", "content": "012="}])


def test_a_chat_needs_a_template(dataset: Write, tokenizer_folder: Path) -> None:
    message = r"no chat template \(model.path = '.*model'\); .* give prompts as strings with data.string_prompts=text"
    chats = dataset([row(0, prompt=[{"role": "user", "content": "12"}])])
    with pytest.raises(
        ConfigError, match=f"part0.parquet: the prompts are chats, but the model's tokenizer has {message}"
    ):
        check_dataset(chats)
    with pytest.raises(DataError, match=f"part0.parquet, row 0: the prompt is a chat, but .* {message}"):
        next(PromptCursor(chats, limit_tokens=10))
    strings = dataset([row(0)], data__string_prompts="user")
    for act in (check_dataset, lambda config: PromptCursor(config, limit_tokens=10)):
        with pytest.raises(ConfigError, match=f"data.string_prompts = 'user', but .* {message}"):
            act(strings)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([{"role": "tool", "content": "1"}], r"row 0: the model's chat template rejects the prompt: no tools"),
        ([{"role": "human", "content": "1"}], r"row 0: 'prompt', message 0: role = 'human'; it must be one of system,"),
        ("", r"part0.parquet, row 0: the prompt has no tokens"),
    ],
)
def test_bad_prompts_are_named(dataset: Write, chat_folder: Path, prompt: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        next(PromptCursor(dataset([row(0, prompt=prompt)]), limit_tokens=10))


@pytest.fixture
def evaluated(dataset: Write, tmp_path: Path) -> Callable[..., Config]:
    """A config with the evaluation rows in two files."""

    def write(*prompts: str, **overrides: Any) -> Config:
        rows = [row(number, prompt=prompt) for number, prompt in enumerate(prompts)]
        files = [str(tmp_path / name) for name in ("eval0.parquet", "eval1.parquet")]
        for file, part in zip(files, (rows[:1], rows[1:]), strict=True):
            write_rows(Path(file), part)
        return dataset([row(0)], data__eval=files, **overrides)

    return write


def test_evaluation_prompts_are_in_order_without_long_ones(evaluated: Callable[..., Config]) -> None:
    config = evaluated("3=", "1234567", "1=", "2=")
    assert check_dataset(config) == 1
    prompts = eval_prompts(config, limit_tokens=5)
    assert [(p.row, p.ground_truth, p.tokens.tolist()) for p in prompts] == [
        (0, "0", [6, 16]),
        (2, "2", [4, 16]),
        (3, "3", [5, 16]),
    ]
    limited = eval_prompts(evaluated("3=", "1234567", "1=", "2=", eval__max_prompts=2), limit_tokens=5)
    assert [p.row for p in limited] == [0, 2]


def test_evaluation_without_prompts(evaluated: Callable[..., Config], dataset: Write) -> None:
    assert eval_prompts(dataset([row(0)]), limit_tokens=5) == []
    with pytest.raises(ConfigError, match=r"data.eval: all 2 prompts are longer than 1 tokens"):
        eval_prompts(evaluated("3=", "4="), limit_tokens=1)
