"""Prompts that are made ahead: their order, errors and number, resuming, and what becomes of lost workers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.config.config import Config
from asyncrl.data import pipeline
from asyncrl.data.cursor import PromptCursor
from asyncrl.data.pipeline import Pipeline
from asyncrl.data.prompts import TrainingRows
from asyncrl.errors import DataError, PeerTimeoutError, RunError
from asyncrl.types import Prompt, PromptPosition
from asyncrl.util.durable import of_bytes, to_bytes
from tests.data.conftest import row
from tests.helpers.examples import examples

pytestmark = pytest.mark.timeout(240)

Write = Callable[..., Config]
OWN = str(Path(__file__).with_name("data_parts.py"))


def rows(cursor: PromptCursor, count: int) -> list[int]:
    return [prompt.row for prompt in islice(cursor, count)]


def one_by_one(config: Config, count: int, *, limit_tokens: int = 10) -> list[int]:
    """The rows of the first prompts, read as they are needed."""
    made = TrainingRows(config, limit_tokens=limit_tokens)
    order, found = made.order(), list[int]()
    while len(found) < count:
        outcome = made[next(order)]
        found += [outcome.row] if isinstance(outcome, Prompt) else []
    return found


def started(config: Config, *, workers: int = 0, limit_tokens: int = 10) -> Pipeline:
    made = TrainingRows(config, limit_tokens=limit_tokens)
    return Pipeline(made, made.order().position, workers=workers, timeout_s=120.0)


@pytest.fixture
def mixed(dataset: Write) -> Callable[..., Config]:
    """Three files with weights, one with a prompt that is too long, and a filter."""

    def write(**settings: Any) -> Config:
        files = [row(i) for i in range(7)], [row(0), row(2, prompt="12345678901"), row(4)], [row(1), row(8)]
        custom = {"filter": f"{OWN}:even"}
        return dataset(*files, data__weights=[0.5, 0.3, 0.2], data__custom=custom, **settings)

    return write


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_order_is_the_same_ahead_and_one_by_one_with_any_number_of_workers(
    mixed: Callable[..., Config], workers: int
) -> None:
    config = mixed(data__workers=workers)
    others = set(active_children())
    cursor = PromptCursor(config, limit_tokens=10)
    assert rows(cursor, 60) == one_by_one(config, 60)
    assert (cursor.skipped_rows, cursor.filtered_rows) == (1, 4)
    thread, processes = cursor._pipeline._thread, set(active_children()) - others  # pyright: ignore[reportOptionalMemberAccess]
    assert len(processes) == workers
    del cursor
    gc.collect()
    wait_until(lambda: not (thread.is_alive() or any(process.is_alive() for process in processes)))


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=6), sampler=st.booleans())
def test_resumes_exactly_at_any_points_in_any_order(
    dataset: Write, moves: list[tuple[int, int]], sampler: bool
) -> None:
    files = [row(i, prompt="12345678901" if i == 4 else f"{i}=") for i in range(9)]
    custom = {"filter": f"{OWN}:even"} | ({"sampler": f"{OWN}:Stages"} if sampler else {})
    config = dataset(files, data__custom=custom)
    cursor, whole = PromptCursor(config, limit_tokens=10), list[int]()
    places = [cursor.position]
    for _ in range(40):
        whole.append(next(cursor).row)
        places.append(cursor.position)
    restarted = PromptCursor(config, limit_tokens=10)
    for number, (place, count) in enumerate(moves):
        for one in (cursor, restarted):
            stored = of_bytes(PromptPosition, to_bytes(PromptPosition, places[place]))
            one.seek(stored)
            assert one.position == places[place]
            taken = min(count, 40 - place)
            assert rows(one, taken) == whole[place : place + taken], number
            assert one.position == places[place + taken]


def test_a_detour_ends_where_the_pipeline_waits(dataset: Write) -> None:
    cursor = PromptCursor(dataset([row(i) for i in range(50)]), limit_tokens=10)
    first = cursor.position
    before = rows(cursor, 20)
    place = cursor.position
    made = cursor._pipeline
    cursor.seek(first)
    assert rows(cursor, 12) == before[:12]
    cursor.seek(place)
    assert cursor._order is None and cursor._pipeline is made, "it continues with what was made ahead"
    assert rows(cursor, 20) == one_by_one(cursor._config, 40)[20:]


def test_errors_come_in_the_turn_of_their_row(dataset: Write) -> None:
    files = [row(i) for i in range(6)] + [row(6, prompt="")]
    cursor = PromptCursor(dataset(files, data__shuffle=False), limit_tokens=10)
    assert rows(cursor, 6) == list(range(6))
    with pytest.raises(DataError, match=r"part0.parquet, row 6: the prompt has no tokens"):
        next(cursor)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_look_ahead_is_bounded(dataset: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "AHEAD_ROWS", 7)
    made = started(dataset([row(i) for i in range(20)]))
    wait_until(lambda: made._ready.qsize() == 7)
    made.take()
    wait_until(lambda: made._ready.qsize() == 7)
    time.sleep(0.1)
    assert made._ready.qsize() == 7
    made.close()
    assert not made._thread.is_alive()


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_the_order_stays(
    dataset: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "AHEAD_ROWS", 4)
    config = dataset([row(i) for i in range(50)], data__workers=1)
    others = set(active_children())
    cursor = PromptCursor(config, limit_tokens=10)
    found = rows(cursor, 3)
    (victim,) = set(active_children()) - others
    victim.kill()
    found += rows(cursor, 57)
    assert found == one_by_one(config, 60)


@pytest.mark.slow
def test_a_row_that_kills_every_worker_is_named(
    dataset: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kills").write_text("100")
    monkeypatch.setenv("OWN_PARTS_KILLS", str(tmp_path / "kills"))
    monkeypatch.setattr(pipeline, "MAX_LOSSES", 1)
    config = dataset(
        [row(i) for i in range(9)], data__workers=1, data__shuffle=False, data__custom={"filter": f"{OWN}:killing"}
    )
    cursor = PromptCursor(config, limit_tokens=10)
    assert rows(cursor, 5) == list(range(5))
    with pytest.raises(RunError, match=r"ended 2 times in a row: .*\(pid.*part0.parquet, row 5 \(data.workers = 1\)"):
        next(cursor)


def test_a_row_that_hangs_is_named_at_the_deadline(dataset: Write) -> None:
    config = dataset(
        [row(i) for i in range(4)],
        data__shuffle=False,
        data__custom={"filter": f"{OWN}:hanging"},
        launch__heartbeat_timeout_s=4.0,
    )
    cursor = PromptCursor(config, limit_tokens=10)
    assert rows(cursor, 2) == [0, 1]
    with pytest.raises(PeerTimeoutError, match=r"no prompt came .* for 2 s \(half of .*: it is at .*parquet, row 2"):
        next(cursor)
