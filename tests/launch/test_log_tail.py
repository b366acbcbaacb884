"""The end of a log that grows: complete lines, each once it was passed on, and the last ones of too many."""

from __future__ import annotations

from pathlib import Path

from asyncrl.launch import log_tail
from asyncrl.launch.log_tail import LogTail


def test_lines_are_read_until_they_were_passed_on(tmp_path: Path) -> None:
    file = tmp_path / "generator-1024.jsonl"
    file.write_text("before\n")
    tail = LogTail(file)
    assert tail.read()[0] == []
    with file.open("a") as stream:
        stream.write("one\ntwo\nhal")
    assert tail.read()[0] == ["one", "two"]
    lines, end = tail.read()
    assert lines == ["one", "two"], "the run did not answer"
    tail.passed(end)
    assert tail.read()[0] == []
    with file.open("a") as stream:
        stream.write("f\n")
    assert tail.read()[0] == ["half"]


def test_a_log_that_does_not_exist_yet(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "none.jsonl")
    assert tail.read() == ([], 0)
    (tmp_path / "none.jsonl").write_text("one\n")
    assert tail.read()[0] == ["one"]


def test_of_too_much_the_end_is_read(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    tail = LogTail(file)
    file.write_text("".join(f"line {number:06d}\n" for number in range(20_000)))
    lines, end = tail.read()
    assert lines[-1] == "line 019999" and end == file.stat().st_size
    assert len(lines) == log_tail.MAX_LOG_LINES
    tail.passed(end)
    with file.open("a") as stream:
        stream.write("x" * 3 * log_tail.MAX_BYTES + "\nlast\n")
    assert LogTail(file).read()[0] == []
    assert tail.read()[0] == ["last"]
