"""Entries of several logs: merged by time, complete in whatever pieces a file is read, and fit for a terminal."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.observe import logs as log_entries
from asyncrl.observe.logs import LineReader, LogEntry, RoleLog, merged, parse_entry


def entry(second: int, event: str, *, level: str = "info", **fields: Any) -> str:
    return json.dumps({**fields, "event": event, "level": level, "timestamp": f"2026-11-25T21:10:{second:02d}.500000Z"})


BEFORE = LogEntry(1764105007.5, "learner-0", "info", ("before",))


def shown(line: str) -> str:
    return parse_entry(line, BEFORE).text(11)


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_an_entry_is_one_line_with_its_fields() -> None:
    line = entry(7, "step done", step=3, loss=-0.01, text="two words", path="runs/a", cpus=[0, 1], role="learner-0")
    assert shown(line) == (
        "2026-11-25 21:10:07.500 learner-0   info     step done step=3 loss=-0.01 "
        'text="two words" path=runs/a cpus=[0, 1]'
    )


def test_an_entry_of_another_host_names_it() -> None:
    line = entry(7, "started", pid=7, role="learner-0", host="n1")
    assert " learner-0@n1 info     started pid=7" in shown(line)
    assert " learner-0   info     replaced host=2" in shown(entry(7, "replaced", role="learner-0", host=2)), "a number"
    after = parse_entry(line, BEFORE)
    assert parse_entry(entry(8, "of a library"), after).role == parse_entry("broken", after).role == "learner-0@n1"
    assert parse_entry(entry(8, "started", role="learner-0"), after).role == "learner-0", "it moved to the launcher's"


def test_tracebacks_and_further_lines_are_indented() -> None:
    line = entry(7, "two\nlines", level="error", error="no", exception="Traceback:\n  File\nValueError: no\n")
    assert shown(line).splitlines()[1:] == ["    lines", "    Traceback:", "      File", "    ValueError: no"]
    assert shown(line).splitlines()[0].endswith("error    two error=no")


@pytest.mark.parametrize(
    "line",
    ["", "nonsense", "[1]", '{"event": "half', '{"event": "x"}', entry(7, "x", level="loud"), '{"timestamp": 3}'],
)
def test_a_line_that_is_no_entry_is_shown_as_it_is(line: str) -> None:
    found = parse_entry(line, BEFORE)
    assert (found.time_s, found.role, found.level, found.lines) == (BEFORE.time_s, "learner-0", "", (line,))


def test_nothing_in_an_entry_commands_the_terminal() -> None:
    assert "\x1b" not in shown(
        entry(7, "\x1b[2J", text="\x1b[2J\x9b", role="\x1b[2J", host="\x1b[2J", exception="\x1b[2J")
    )
    assert parse_entry("\x1b[31mred\x1b[0m \x1b[2J", BEFORE).lines == ("red \\x1b[2J",)
    assert log_entries.plain_line(" 1 %\r99 %\r100 %\r") == "100 %"


LINES = st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=12), max_size=12)


@settings(deadline=None)
@given(LINES, st.integers(1, 9), st.lists(st.integers(1, 30), max_size=8), st.booleans())
def test_lines_are_whole_however_the_file_grows(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], chunk_bytes: int, pieces: list[int], ended: bool
) -> None:
    """The file is written piece by piece and read after each, in chunks shorter than its lines."""
    path = tmp_path_factory.mktemp("log") / "replay.jsonl"
    content = ("\n".join(lines) + ("\n" if ended and lines else "")).encode()
    reader, found = LineReader(path, chunk_bytes), list[str]()
    for size in [*pieces, len(content) + 1]:
        with path.open("ab") as file:
            file.write(content[:size])
        content = content[size:]
        found += reader.lines(with_rest=False)
    found += reader.lines(with_rest=True)
    if not ended and lines and not lines[-1]:
        lines = lines[:-1]  # nothing is after the last newline
    assert found == lines


def test_a_file_that_was_replaced_or_cut_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    reader = LineReader(path)
    assert list(reader.lines(with_rest=False)) == [], "it may not be there yet"
    path.write_text("one\ntwo\n")
    assert list(reader.lines(with_rest=False)) == ["one", "two"]
    path.write_text("cut\n")
    assert list(reader.lines(with_rest=False)) == ["cut"]
    other = tmp_path / "b.jsonl"
    other.write_text("other\nlines\n")
    other.replace(path)
    assert list(reader.lines(with_rest=False)) == ["other", "lines"]


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 59), max_size=9).map(sorted), max_size=3))
def test_logs_are_merged_by_time(tmp_path_factory: pytest.TempPathFactory, times: dict[str, list[int]]) -> None:
    folder = tmp_path_factory.mktemp("logs")
    for role, seconds in times.items():
        lines = (entry(second, str(number)) + "\n" for number, second in enumerate(seconds))
        (folder / f"{role}.jsonl").write_text("".join(lines))
    logs = [RoleLog(folder / f"{role}.jsonl", level="debug") for role in times]
    found = list(merged(logs, with_rest=True))
    assert [one.time_s for one in found] == sorted(one.time_s for one in found)
    for role, seconds in times.items():
        assert [one.lines[0] for one in found if one.role == role] == [str(number) for number in range(len(seconds))]
    assert list(merged(logs, with_rest=True)) == [], "each entry is read once"


def test_levels_leave_out_entries_but_no_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([entry(5, "quiet"), entry(6, "loud", level="warning"), "half"]))
    log = RoleLog(path, level="warning")
    assert [one.lines[0] for one in log.new_entries(with_rest=True)] == ["loud", "half"]
