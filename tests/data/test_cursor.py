"""The stream of prompts: shuffled, endless, resumable, without what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.data.cursor import PromptCursor
from asyncrl.errors import ConfigError, DataError
from tests.data.conftest import row

Write = Callable[..., Config]
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


def rows(cursor: PromptCursor, count: int) -> list[int]:
    return [prompt.row for prompt in islice(cursor, count)]


def test_every_epoch_has_every_row_once_in_another_order(dataset: Write) -> None:
    cursor = PromptCursor(dataset([row(i) for i in range(7)]), limit_tokens=10)
    epochs = [rows(cursor, 7) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_is_that_of_the_seed(dataset: Write) -> None:
    files = [row(i) for i in range(9)]
    first, again, other = (rows(PromptCursor(dataset(files, seed=s), limit_tokens=10), 18) for s in (1, 1, 2))
    assert first == again != other
    assert rows(PromptCursor(dataset(files, data__shuffle=False), limit_tokens=10), 9) == list(range(9))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.integers(0, 23))
def test_resumes_after_the_last_prompt_wherever_it_was(dataset: Write, before: int) -> None:
    config = dataset([row(i) for i in range(5)])
    cursor = PromptCursor(config, limit_tokens=10)
    rows(cursor, before)
    state = cursor.state_dict()
    resumed = PromptCursor(config, limit_tokens=10)
    resumed.load_state_dict(state)
    assert rows(resumed, 13) == rows(cursor, 13)


def test_prompt_is_tokenized_with_the_models_tokenizer(dataset: Write) -> None:
    prompt = next(PromptCursor(dataset([row(12)]), limit_tokens=10))
    assert prompt.tokens.tolist() == [3, 4, 5, 16]
    assert prompt.tokens.dtype == "int32"
    assert (prompt.ground_truth, prompt.data_source, prompt.extra_info) == ("12", "numbers", {"index": 12})


def test_long_prompts_are_skipped_and_counted_once(dataset: Write) -> None:
    config = dataset([row(0), row(1, prompt="1234567"), row(2)])
    cursor = PromptCursor(config, limit_tokens=6)
    assert set(rows(cursor, 10)) == {0, 2}
    assert cursor.skipped_rows == 1


def test_only_long_prompts_end_in_an_error_not_in_a_loop(dataset: Write) -> None:
    cursor = PromptCursor(dataset([row(0), row(1)]), limit_tokens=3)
    with pytest.raises(ConfigError, match="all 2 prompts are longer than 3 tokens"):
        next(cursor)


def test_chat_prompts_go_through_the_template(dataset: Write, tokenizer_folder) -> None:  # type: ignore[no-untyped-def]
    chat = [{"role": "user", "content": "12"}]
    config = dataset([row(0, prompt=chat)])
    with pytest.raises(DataError, match="the model's tokenizer has no chat template"):
        next(PromptCursor(config, limit_tokens=10))
    (tokenizer_folder / "chat_template.jinja").write_text(CHAT)
    assert next(PromptCursor(config, limit_tokens=10)).tokens.tolist() == [4, 5, 16]
