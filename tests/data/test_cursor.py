"""The stream of prompts: shuffled, endless, resumable, without what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.config.config import Config
from asyncrl.data.cursor import PromptCursor
from asyncrl.data.prompts import fit
from asyncrl.errors import ConfigError
from asyncrl.types import Prompt, PromptPosition
from asyncrl.util.durable import of_bytes, to_bytes
from tests.data.conftest import row
from tests.helpers.examples import examples

Write = Callable[..., Config]


def rows(cursor: PromptCursor, count: int) -> list[int]:
    return [prompt.row for prompt in islice(cursor, count)]


def through_msgpack(position: PromptPosition) -> PromptPosition:
    return of_bytes(PromptPosition, to_bytes(PromptPosition, position))


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


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.integers(0, 23))
def test_resumes_after_the_last_prompt_wherever_it_was(dataset: Write, before: int) -> None:
    config = dataset([row(i) for i in range(5)])
    cursor = PromptCursor(config, limit_tokens=10)
    rows(cursor, before)
    position = cursor.position
    resumed = PromptCursor(config, limit_tokens=10)
    resumed.seek(position)
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


def test_what_was_skipped_is_saved_in_bytes_that_the_data_bounds(dataset: Write) -> None:
    config = dataset([row(i, prompt="1234567" if i % 4 else "1=") for i in range(800)])
    cursor = PromptCursor(config, limit_tokens=6)
    rows(cursor, 201)  # one more than an epoch has
    assert cursor.skipped_rows == 600
    position = cursor.position
    assert len(position.skipped) < 800 / 8
    resumed = PromptCursor(config, limit_tokens=6)
    resumed.seek(position)
    assert resumed.position == position


def test_only_long_prompts_end_in_an_error_not_in_a_loop(dataset: Write) -> None:
    cursor = PromptCursor(dataset([row(0), row(1)]), limit_tokens=3)
    with pytest.raises(ConfigError, match="all 2 prompts are longer than 3 tokens"):
        next(cursor)


def test_weights_are_the_shares_of_the_files_and_each_has_epochs_of_its_own(dataset: Write) -> None:
    config = dataset([row(i) for i in range(4)], [row(i) for i in range(30)], data__weights=[3.0, 1.0])
    seen = rows(PromptCursor(config, limit_tokens=10), 4000)
    first = [r for r in seen if r < 4]
    assert len(first) == pytest.approx(3000, abs=100)
    epochs = [first[i : i + 4] for i in range(0, len(first) - 4, 4)]
    assert all(sorted(epoch) == [0, 1, 2, 3] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 5
    second = [r for r in seen if r >= 4]
    assert sorted(second[:30]) == list(range(4, 34))
    again, other = (rows(PromptCursor(dataset_with(config, seed), limit_tokens=10), 100) for seed in (0, 1))
    assert again == seen[:100] != other


def dataset_with(config: Config, seed: int) -> Config:
    return config.model_copy(update={"seed": seed})


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.integers(0, 40), shuffle=st.booleans())
def test_weighted_stream_resumes_exactly(dataset: Write, before: int, shuffle: bool) -> None:
    files = [row(i) for i in range(5)], [row(0), row(1, prompt="12345678901"), row(2)], [row(0)]
    config = dataset(*files, data__weights=[0.5, 0.3, 0.2], data__shuffle=shuffle)
    cursor = PromptCursor(config, limit_tokens=10)
    rows(cursor, before)
    position = through_msgpack(cursor.position)
    resumed = PromptCursor(config, limit_tokens=10)
    resumed.seek(position)
    assert rows(resumed, 30) == rows(cursor, 30)
    assert resumed.skipped_rows == cursor.skipped_rows == 1


def test_a_weighted_file_in_which_nothing_fits_is_an_error(dataset: Write) -> None:
    cursor = PromptCursor(
        dataset([row(0)], [row(1, prompt="1234567"), row(2, prompt="1234567")], data__weights=[1, 1]), limit_tokens=6
    )
    with pytest.raises(ConfigError, match=r"part1.parquet: all 2 prompts are longer than 6 tokens"):
        rows(cursor, 100)


def test_another_dataset_is_not_resumed(dataset: Write) -> None:
    position = PromptCursor(dataset([row(i) for i in range(5)]), limit_tokens=10).position
    cursor = PromptCursor(dataset([row(i) for i in range(6)]), limit_tokens=10)
    with pytest.raises(ConfigError, match=r"had \[5\] rows when the run was saved and have \[6\] now"):
        cursor.seek(position)


def test_any_row_can_be_had_and_the_state_goes_through_msgpack(dataset: Write) -> None:
    config = dataset([row(i) for i in range(5)], [row(0, prompt="12345678901"), row(1)])
    cursor = PromptCursor(config, limit_tokens=10)
    drawn = [next(cursor) for _ in range(9)]
    position = through_msgpack(cursor.position)
    for prompt in drawn:
        again = cursor.prompt(prompt.row)
        assert (again.ground_truth, again.tokens.tolist()) == (prompt.ground_truth, prompt.tokens.tolist())
    resumed = PromptCursor(config, limit_tokens=10)
    resumed.seek(position)
    assert rows(resumed, 9) == rows(cursor, 9)
    resumed.seek(position)
    assert resumed.position == position
    after = rows(resumed, 5)
    resumed.seek(position)
    assert rows(resumed, 5) == after


@pytest.mark.parametrize(("side", "kept"), [("left", [5, 6, 7]), ("right", [3, 4, 5]), ("middle", [3, 6, 7])])
def test_a_long_prompt_loses_tokens_where_the_config_says(side: str, kept: list[int]) -> None:
    prompt = Prompt(0, np.arange(3, 8, dtype=np.int32), "1", "test")
    cut = fit(prompt, 3, side)  # pyright: ignore[reportArgumentType]
    assert cut is not None and cut.tokens.tolist() == kept and cut.tokens.dtype == np.int32
    assert fit(prompt, 5, "left") is prompt and fit(prompt, 4, "skip") is None


def test_long_prompts_are_cut_and_not_skipped(dataset: Write) -> None:
    config = dataset([row(1), row(1234)], data__too_long="left", data__shuffle=False)
    cursor = PromptCursor(config, limit_tokens=3)
    lengths = [len(prompt.tokens) for prompt in islice(cursor, 4)]
    assert lengths == [3, 3, 3, 3] and cursor.skipped_rows == 0
    assert len(cursor.prompt(1).tokens) == 3
