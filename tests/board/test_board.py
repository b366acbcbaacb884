"""The board's server: who may ask for what, the list of runs, documents that change, and complete samples."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from asyncrl.errors import PeerTimeoutError
from asyncrl.launch.run_dir import lock_path
from asyncrl.observe import run_report as documents
from asyncrl.observe.board import CARD_POINTS, HOSTS, card_of
from asyncrl.util.locks import try_lock
from tests.helpers.board import Client, add_samples, append_metrics, made_run, rows_of, serving
from tests.helpers.cli import asyncrl
from tests.plan.made_runs import make_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    made_run(folder / "one", status="finished", bottleneck="learner-bound", reward_first=0.1, reward_last=0.4, steps=40)
    made_run(folder / "two")
    (folder / "no run").mkdir()
    return folder


@pytest.fixture
def board(runs: Path) -> Iterator[Client]:
    with serving(runs) as client:
        yield client


def test_only_the_address_with_the_token_is_answered(board: Client) -> None:
    path = f"/{board.token}/"
    status, page, headers = board.request(path)
    assert status == 200 and b"web/board.js" in page
    assert "default-src 'none'" in headers["content-security-policy"] and headers["referrer-policy"] == "no-referrer"
    assert "server" not in headers
    for wrong in ("/", "/runs", f"/{board.token[:-1]}/", f"/{board.token}x/runs", "/%C3%A9/runs", "//", "/web/page.js"):
        status, body, headers = board.request(wrong)
        assert status == 404 and b"use the address that" in body, wrong
        assert "content-security-policy" in headers
    status, _, headers = board.request(path[:-1])
    assert (status, headers["location"]) == (307, f"http://127.0.0.1:{board.port}{path}")


def test_other_hosts_and_requests_that_would_change_something_are_refused(board: Client) -> None:
    for host in HOSTS:
        assert board.request(f"/{board.token}/runs", Host=f"{host}:9999")[0] == 200
    for host in ("example.com", f"example.com:{board.port}", "127.0.0.1.example.com", ""):
        assert board.request(f"/{board.token}/runs", Host=host)[0] == 400, host
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert board.request(f"/{board.token}/runs", method=method)[0] == 405, method


def test_no_path_of_a_request_leads_out_of_the_folder(board: Client, runs: Path) -> None:
    made_run(runs.parent / "secret")
    outside = (
        "..",
        "../secret",
        "..%2Fsecret",
        "%2e%2e%2fsecret",
        "..%5csecret",
        "one/../../secret",
        "no%20run",
        "one%00",
    )
    for name in outside:
        status, body, _ = board.request(f"/{board.token}/run/{name}/since/0")
        assert status == 404 and b"document" not in body, name
    for name in ("..%2f__init__.py", "../page.py", "report.js", "uplot.LICENSE", "%2fetc%2fpasswd"):
        assert board.request(f"/{board.token}/web/{name}")[0] == 404, name


def test_the_list_has_every_run_with_its_state(board: Client, runs: Path) -> None:
    made_run(runs / "empty", steps=0)
    (made_run(runs / "damaged") / "metrics.jsonl").write_text("nonsense\n")
    made_run(runs / "failed", status="failed", error="out of memory")
    lock = lock_path(runs / "two").open("w")
    assert try_lock(lock.fileno(), lock_path(runs / "two"))
    cards = {card["name"]: card for card in board.get("runs")["runs"]}
    assert {name: card["status"] for name, card in cards.items()} == {
        "one": "finished", "two": "running", "empty": "unfinished", "damaged": "unfinished", "failed": "failed",
    }  # fmt: skip
    assert cards["one"]["reward"] == [0.1, 0.4] and cards["one"]["verdict"] == "learner-bound"
    assert cards["two"]["step"] == cards["two"]["steps"] == 40 and len(cards["two"]["curve"]) == 40
    assert 0 < cards["two"]["reward"][0] < cards["two"]["reward"][1] < 0.5 and cards["two"]["tokens_per_s"] == 200
    assert "is not JSON" in cards["damaged"]["verdict"] and cards["failed"]["verdict"] == "out of memory"
    lock.close()
    assert {card["name"]: card["status"] for card in board.get("runs")["runs"]}["two"] == "unfinished"


def test_a_run_with_an_alarm_is_seen_in_the_list(board: Client, runs: Path) -> None:
    append_metrics(runs / "two", [row | {"collapse/alarms": 2.0} for row in rows_of(1, first=41)])
    assert {card["name"]: card["alarms"] for card in board.get("runs")["runs"]} == {"one": 0, "two": 2}


def test_a_card_follows_its_run(board: Client, runs: Path) -> None:
    board.get("runs")
    append_metrics(runs / "two", rows_of(5, first=41))
    assert {card["name"]: card["step"] for card in board.get("runs")["runs"]} == {"one": 40, "two": 45}


def test_a_card_of_a_long_run_reads_a_part_of_its_file(tmp_path: Path) -> None:
    run = made_run(tmp_path / "long", steps=20_000)
    begun_s = time.monotonic()
    card = card_of(run, running=False)
    assert time.monotonic() - begun_s < 0.5 and card["step"] > 19_990
    assert CARD_POINTS / 2 < len(card["curve"]) <= CARD_POINTS and card["curve"] == sorted(card["curve"])


def document_of(board: Client, name: str, since: int = 0) -> tuple[dict[str, Any], int]:
    answer = board.get(f"run/{name}/since/{since}")
    return answer["document"], answer["revision"]


def test_a_run_is_sent_when_it_has_changed(board: Client, runs: Path) -> None:
    document, revision = document_of(board, "two")
    assert {"name", "status", "charts", "tiles", "samples", "ledger", "config", "timeline"} <= document.keys()
    assert document_of(board, "two", revision) == (None, revision)
    append_metrics(runs / "two", rows_of(3, first=41))
    time.sleep(0.6)
    changed, later = document_of(board, "two", revision)
    assert later > revision
    (reward,) = (line for line in changed["charts"][0]["charts"][0]["lines"] if line[0] == "reward/mean")
    assert reward[1][-1] == 43
    assert board.get("run/none/since/0", status=404) == {"error": "none: there is no such run any more"}


def test_secrets_do_not_leave_the_board(board: Client, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "0123456789abcdef")
    for name in ("config.yaml", "summary.json"):
        text = (runs / "one" / name).read_text()
        (runs / "one" / name).write_text(text.replace("learner-bound", "0123456789abcdef") + "\n")
    with (runs / "one" / "config.yaml").open("a") as file:
        file.write("left_over: 0123456789abcdef\n")
    document, _ = document_of(board, "one")
    assert "***" in document["config"] and document["verdict"] == "***"
    assert "0123456789abcdef" not in json.dumps([document, board.get("runs")])


class Queue:
    """A replay queue that tells a summary, or does not answer."""

    summaries: ClassVar[list[dict[str, Any] | None]]
    closed = 0

    def __init__(self, endpoints: object, *, timeout_s: float) -> None:
        pass

    def summary(self) -> dict[str, Any]:
        told = self.summaries.pop(0)
        if told is None:
            raise PeerTimeoutError("no answer")
        return told

    def close(self) -> None:
        type(self).closed += 1


def test_a_live_run_has_what_its_queue_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"generated": 9, "trained": 6, "refunded": {}, "returned": 0, "in_flight": 3}
    ledger = {"leased": 3, "trained": 2, "refunded": {}, "in_flight": 1, "trajectories": counts, "tokens": counts}
    told = {
        "steps": 40, "idle": {"generator": 0.01, "environments": 0.0, "learner": 0.6},
        "staleness": {"limit": 4, "mean": 1.0, "max": 2},
        "ledger": ledger,
    }  # fmt: skip
    run = made_run(tmp_path / "live")
    monkeypatch.setattr(documents, "LauncherClient", Queue)
    monkeypatch.setattr(documents, "read_endpoints", lambda run_dir: None)
    monkeypatch.setattr(documents, "is_running", lambda run_dir: True)
    Queue.summaries = [dict(told), None, dict(told)]
    summary = documents.RunSummary(run)
    first, second = summary.read(), summary.read()
    assert first["status"] == "running" and first["bottleneck"].startswith("generator-bound: generators idle 1%")
    assert second == first | {"unanswered": "the replay queue does not tell its state: no answer"}
    document = documents.document_of(run)
    assert document["ledger"][0] == ["generated", 3, 9, 9] and document["status"] == "running"
    assert {tile["title"] for tile in document["tiles"]} >= {"What holds it back?", "How off-policy?"}
    collapse = {"active": True, "sentence": "diverges since step 12", "alarms": []}
    Queue.summaries = [told | {"collapse": collapse}]
    assert summary.read()["bottleneck"] == "diverges since step 12"
    (run / "summary.json").write_text('{"status": "stopped"}')
    assert summary.read() == {"status": "stopped"}, "its end is written before its lock is released"
    assert Queue.closed == 3


def test_complete_samples_of_steps_and_evaluations(board: Client, runs: Path) -> None:
    add_samples(runs / "two", completion_tokens=6000)
    document, _ = document_of(board, "two")
    short = next(row for row in document["samples"]["trained"] if row["ticket"] == 3 and row["index"] == 0)
    assert "characters ..." in short["completion"]
    group = board.get("run/two/group/3")["samples"]
    assert [row["index"] for row in group] == [0, 1] and len(group[0]["completion"]) > len(short["completion"])
    assert group[0]["versions"] == [] and group[0]["start_version"] == 0
    (evaluated,) = board.get("run/two/evaluated/5/2")["samples"]
    assert (evaluated["row"], evaluated["step"]) == (2, 5) and "completion" in evaluated
    assert "version 7: its evaluation" in board.get("run/two/evaluated/7/2", status=400)["error"]
    assert "ticket 99: the group is not stored" in board.get("run/two/group/99", status=400)["error"]


def test_a_run_with_trace_has_a_timeline_and_the_report_the_same_document(board: Client, runs: Path) -> None:
    make_run(runs / "traced")
    document, _ = document_of(board, "traced")
    report = documents.document_of(runs / "traced")
    assert document["timeline"]
    assert document == json.loads(json.dumps(report))


def test_wrong_folders_and_ports_are_refused(runs: Path) -> None:
    code, output = asyncrl("board", "nowhere", cwd=runs)
    assert (code, output.split(";")[0]) == (2, "error: nowhere: there is no such folder")
    code, output = asyncrl("board", "one", cwd=runs)
    assert (code, output) == (2, f"error: one: is the folder of one run; give the one above it, {runs}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = asyncrl("board", ".", "--port", str(port), cwd=runs)
    assert code == 2 and output.startswith(f"error: --port {port}: Address already in use") and "give another" in output


def test_the_command_prints_its_address_and_ends_on_ctrl_c(runs: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.cli", "board", str(runs)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        assert process.stdout is not None
        name, address = process.stdout.readline().split()
        assert name == "board"
        assert process.stdout.readline() == "for this machine only; Ctrl-C ends it\n"
        assert len(Client(address).get("runs")["runs"]) == 2
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=20)
        assert (process.returncode, rest) == (0, "")
    finally:
        process.kill()
