"""Chats and texts as tokens, verl's schema from end to end, and the prompts of an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from asyncrl.config.config import Config
from asyncrl.data.cursor import PromptCursor
from asyncrl.data.prompts import PromptBuilder, eval_prompts
from asyncrl.data.row_files import write_rows
from asyncrl.data.rows import PromptTable, check_dataset
from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.errors import ConfigError, DataError
from asyncrl.util.model_files import load_tokenizer
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
    assert (text.tokens.tolist(), text.chat, text.text) == ([3, 4, 5, 16], None, "012=")
    said = next(PromptCursor(dataset([row(12)], data__string_prompts="user"), limit_tokens=10))
    assert (said.tokens.tolist(), said.chat) == ([3, 4, 5, 16, 16], [{"role": "user", "content": "012="}])
    assert said.text == ""


def test_a_chat_needs_a_template(dataset: Write, tokenizer_folder: Path) -> None:
    message = r"no chat template \(model.path = '.*model'\); .* give prompts as strings with data.string_prompts=text"
    chats = dataset([row(0, prompt=[{"role": "user", "content": "12"}])])
    with pytest.raises(
        ConfigError, match=f"part0.parquet: the prompt is a chat, but the model's tokenizer has {message}"
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


THINKING = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<' if thinks else '>' }}{% endif %}"
)
"""The assistant's answer begins with < if it thinks, otherwise with >."""
ASK = [{"role": "user", "content": "1+1="}]


def prompt_texts(config: Config) -> list[str]:
    """The prompts of all rows, with special tokens."""
    table, build = PromptTable(config), PromptBuilder(config)
    tokenizer = load_tokenizer(config.model.path)
    return [tokenizer.decode(build(table[number]).tokens) for number in range(len(table))]


def test_options_of_the_template_are_a_key_that_a_column_overrides(
    dataset: Write, chat_folder: Path, tmp_path: Path
) -> None:
    (chat_folder / "chat_template.jinja").write_text(THINKING)
    rows = [row(0, prompt=ASK, chat_template_kwargs=own) for own in (None, {"thinks": True}, {"thinks": False})]
    assert prompt_texts(dataset(rows)) == ["1+1=>", "1+1=<", "1+1=>"]
    config = dataset(rows, data__template_options={"thinks": True})
    assert prompt_texts(config) == ["1+1=<", "1+1=<", "1+1=>"]
    assert PromptTable(config)[1]["columns"]["chat_template_kwargs"] == {"thinks": True}
    (tmp_path / "rows.csv").write_text('prompt,answer,chat_template_kwargs\n1+1=,2,"{""thinks"": true}"\n1+1=,2,\n')
    csv = {"data__train": str(tmp_path / "rows.csv"), "data__columns__ground_truth": "answer"}
    assert prompt_texts(dataset(**csv, data__string_prompts="user")) == ["1+1=<", "1+1=>"]


def test_options_that_are_none_of_a_template_are_refused(dataset: Write, chat_folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"template_options.*tokenize = True: is not an option of a chat template: the run"
    ):
        dataset([row(0)], data__template_options={"tokenize": True})
    for own, error in (
        (
            {"add_generation_prompt": False},
            "add_generation_prompt = False: is not an option of a chat template: the last",
        ),
        ("yes", "'chat_template_kwargs': not JSON"),
        (3, "'chat_template_kwargs' is int; it must be a struct with options of the chat template"),
    ):
        with pytest.raises(DataError, match=f"row 0: {error}|row 0: 'chat_template_kwargs': {error}"):
            prompt_texts(dataset([row(0, prompt=ASK, chat_template_kwargs=own)]))


def test_the_assistants_last_words_are_continued(dataset: Write, chat_folder: Path) -> None:
    (chat_folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<eos>{% endfor %}=")
    prefill = [*ASK, {"role": "assistant", "content": "<"}]
    assert prompt_texts(dataset([row(0, prompt=ASK)], [row(1, prompt=prefill)])) == ["1+1=<eos>=", "1+1=<eos><"]
    call = [*ASK, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]
    with pytest.raises(DataError, match="row 0: the prompt ends with a call of a tool; add the tool's answer"):
        prompt_texts(dataset([row(0, prompt=call)]))


def test_a_template_may_raise_anything(dataset: Write, chat_folder: Path) -> None:
    (chat_folder / "chat_template.jinja").write_text("{{ messages[0].name + 1 }}")
    with pytest.raises(DataError, match="row 0: the model's chat template rejects the prompt"):
        prompt_texts(dataset([row(0, prompt=ASK)]))


@pytest.mark.parametrize(
    ("around", "text", "prompt"),
    [
        ("<bos> $A", "1+1=", "<bos>1+1="),
        ("<bos> $A", "<bos>1+1=", "<bos>1+1="),
        ("$A <eos>", "1+1=", "1+1="),
        ("<bos> $A <eos>", "1+1=", "<bos>1+1="),
        ("<bos> $A <eos>", "<bos>1+1=<eos>2+2=", "<bos>1+1=<eos>2+2="),
    ],
)
def test_a_text_has_one_begin_and_no_end(tmp_path: Path, dataset: Write, around: str, text: str, prompt: str) -> None:
    save_marking(tmp_path / "model", around)
    assert prompt_texts(dataset([row(0, prompt=text)])) == [prompt]
    with pytest.raises(DataError, match="row 0: the prompt ends with '<eos>', after which the model writes nothing"):
        prompt_texts(dataset([row(0, prompt="1+1=<eos>")]))
    with pytest.raises(DataError, match="row 0: the prompt has no tokens"):
        prompt_texts(dataset([row(0, prompt="")]))


def save_marking(folder: Path, around: str) -> PreTrainedTokenizerFast:
    """The tokenizer with tokens around texts."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    special = [(text, tokenizer.convert_tokens_to_ids(text)) for text in ("<bos>", "<eos>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=special)
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_a_token_without_an_embedding_is_named_with_its_row(dataset: Write, tokenizer_folder: Path) -> None:
    (tokenizer_folder / "config.json").write_text('{"vocab_size": 21}')
    assert prompt_texts(dataset([row(0)])) == ["000="]
    (tokenizer_folder / "config.json").write_text('{"text_config": {"vocab_size": 16}}')
    with pytest.raises(DataError, match=r"part0.parquet, row 0: the prompt has the token 16 \('='\), .* has 16 rows"):
        prompt_texts(dataset([row(0)]))
