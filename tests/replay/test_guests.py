"""Guests: who is let in by which key, and what a guest may ask of the replay queue."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from asyncrl.config import MAX_GENERATORS
from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.launch.commands.join import Head
from asyncrl.launch.log_tail import LogTail
from asyncrl.launch.resources.network import find_port
from asyncrl.observe.live import _disturbances  # pyright: ignore[reportPrivateUsage]
from asyncrl.replay import guest_logs
from asyncrl.replay.client import GeneratorClient, LauncherClient, LeaseReply
from asyncrl.replay.guest_logs import GuestLogs
from asyncrl.replay.guests import Reception
from asyncrl.replay.metrics.trace import TraceWriter
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.server import run_replay
from asyncrl.types import FIRST_GUEST, Lease
from asyncrl.util.files import replace_file
from asyncrl.wire.bounds import Body
from asyncrl.wire.curve_keys import new_keys, new_pair, read_keys
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.guest_messages import GuestLog, Hello, Welcome
from asyncrl.wire.guests import HELLO_ID, Guest, Guests
from asyncrl.wire.launcher_messages import Lost, ReadStatus, ReadSummary, Scale, Shutdown, Stop
from asyncrl.wire.learner_messages import Begin, Commit, NextEvaluation, Take
from asyncrl.wire.messages import GeneratorStats, Release, ReleasedLease
from asyncrl.wire.rpc import Connection
from asyncrl.wire.service_messages import Ok
from tests.helpers.replay import EndlessPrompts, ask_queue, make_group, small_config

FACTS = {"vllm": "0.32.0", "torch": "2.13.0", "config.json of the model": "ab12"}


@dataclass
class Served:
    """A replay queue with keys, and a guest "lab" with two generators."""

    queue: ReplayQueue
    own: Endpoints
    guest: Endpoints
    table: Path

    def write(self, *names: str) -> None:
        public = read_keys(self.guest.keys).client_public
        entry = {"key": public, "first": FIRST_GUEST, "generators": 2}
        replace_file(self.table, json.dumps({"next_index": 2000, "guests": dict.fromkeys(names, entry)}))

    def hello(self, facts: dict[str, str] | None = None) -> Welcome:
        with closing(Connection(replace(self.guest, run_id=HELLO_ID))) as connection:
            return connection.request(Hello(FACTS if facts is None else facts), timeout_s=5.0).body

    def status(self) -> dict[str, Any]:
        with closing(LauncherClient(self.own)) as launcher:
            return launcher.status()

    def bad_messages(self) -> int:
        return self.status()["bad_messages"]


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"weights__transport": "files", "weights__url": "/shared/weights"}


@pytest.fixture
def served(tmp_path: Path, settings: dict[str, Any]) -> Iterator[Served]:
    keys = new_keys()
    public, secret = new_pair()
    mine = {**json.loads(keys), "server_secret": "", "client_public": public, "client_secret": secret}
    address = f"tcp://127.0.0.1:{find_port()}"
    own = Endpoints("the launch", address, "run:weights", "run:learners", keys=keys)
    config = small_config(**settings)
    queue = ReplayQueue(config, EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"))
    table, stop = tmp_path / "guests.json", threading.Event()
    reception = Reception(
        Guests(table),
        config,
        own.run_id,
        7,
        greedy_baseline=False,
        reward_model=False,
        read_facts=lambda model: FACTS,
        logs=GuestLogs(tmp_path),
    )
    thread = threading.Thread(target=run_replay, args=(queue, own, stop.is_set), kwargs={"reception": reception})
    one = Served(queue, own, replace(own, keys=json.dumps(mine)), table)
    one.write("lab")
    thread.start()
    yield one
    stop.set()
    thread.join(timeout=10)
    assert not thread.is_alive()


def ask(client: GeneratorClient, num_groups: int) -> LeaseReply:
    client.ask(0, num_groups, GeneratorStats.of(working_s=1.0))
    deadline_s = time.monotonic() + 5.0
    while (reply := client.poll(0.05)) is None:
        assert time.monotonic() < deadline_s
    return reply


def is_refused(endpoints: Endpoints, body: Body, *, timeout_s: float = 0.5) -> bool:
    with closing(Connection(endpoints, linger_s=0.0)) as connection:
        try:
            connection.request(body, timeout_s=timeout_s)
        except PeerTimeoutError:
            return True
    return False


def test_a_guest_is_welcomed_and_its_groups_count_like_any_others(served: Served) -> None:
    welcome = served.hello()
    assert (welcome.problem, welcome.run_id, welcome.first, welcome.generators) == ("", "the launch", FIRST_GUEST, 2)
    assert "max_staleness: 1" in welcome.config and welcome.prompt_tokens == 7
    guest = GeneratorClient(served.guest, FIRST_GUEST)
    reply = ask(guest, 2)
    assert (len(reply.leases), reply.leave) == (2, False)
    guest.finish(make_group(reply.leases[0], 0, generator=FIRST_GUEST))
    guest.release([(reply.leases[1].ticket, reply.leases[1].attempt, 5)])
    guest.close()
    status = served.status()
    assert (guest.unacknowledged, status["finished"], status["leased"]) == (0, 1, 0)
    assert list(status["generators"]) == [str(FIRST_GUEST)]
    assert served.bad_messages() == 0


def stolen(kind: str) -> Body:
    """A message of the launcher or of a learner."""
    bodies: list[Body] = [
        Begin(0, 9, 0), Take(0, 9, 1), Commit(9, 1, {}, False, []), NextEvaluation(9, 0), Scale(5), ReadStatus(),
        ReadSummary(), Stop("by a guest"), Shutdown(),
    ]  # fmt: skip
    return next(body for body in bodies if kind == type(body).__name__)


KINDS = ("Begin", "Take", "Commit", "NextEvaluation", "Scale", "ReadStatus", "ReadSummary", "Stop", "Shutdown")


@pytest.mark.parametrize("kind", KINDS)
def test_a_guest_may_not_send_what_a_generator_does_not(served: Served, kind: str) -> None:
    assert is_refused(served.guest, stolen(kind))
    status = served.status()
    assert (status["bad_messages"], status["generators_wanted"], status["done"]) == (1, 1, False)
    assert not is_refused(served.own, stolen("ReadStatus"), timeout_s=5.0)


def test_guests_speak_for_their_own_generators_only(served: Served) -> None:
    own = GeneratorClient(served.own, 0)
    (lease,) = ask(own, 1).leases
    for index in (0, FIRST_GUEST - 1, FIRST_GUEST + 2):
        assert is_refused(served.guest, Lost(index))
        assert is_refused(served.guest, Release(index, [ReleasedLease(lease.ticket, 0, 0)], []))
    assert served.bad_messages() == 6
    assert not is_refused(served.guest, Lost(FIRST_GUEST + 1), timeout_s=5.0)
    own.close()


def test_what_a_guest_logs_is_shown_with_the_logs_of_the_run(served: Served, tmp_path: Path) -> None:
    entry = {
        "event": "failed",
        "level": "error",
        "timestamp": "2026-01-01T00:00:00Z",
        "role": "learner-0",
        "host": "n1",
    }
    lines = [json.dumps(entry | {"error": "no space"}), "no entry", "[]", "[" * 60_000, json.dumps(entry | {"role": 3})]
    index = FIRST_GUEST + 1
    assert not is_refused(served.guest, GuestLog(index, lines), timeout_s=5.0)
    assert not is_refused(served.guest, GuestLog(index, ["no entry"]), timeout_s=5.0)
    assert [path.name for path in tmp_path.glob("*.jsonl")] == [f"generator-{index}.jsonl"]
    stored = (tmp_path / f"generator-{index}.jsonl").read_text().splitlines()
    own = entry | {"role": f"generator-{index}", "host": "lab"}
    assert list(map(json.loads, stored)) == [own | {"error": "no space"}, own]
    for refused in (FIRST_GUEST + 2, 0):
        assert is_refused(served.guest, GuestLog(refused, lines))
    with pytest.raises(RunError, match="'guest_log' is for guests"):
        is_refused(served.own, GuestLog(index, lines))
    assert len(list(tmp_path.glob("*.jsonl"))) == 1


def test_a_guest_passes_its_log_on_until_the_run_has_it(served: Served, tmp_path: Path) -> None:
    key: Any = SimpleNamespace(keys=served.guest.keys)
    head, file = Head(key, served.guest.replay), tmp_path / "here.log"
    tail = LogTail(file)
    file.write_text(json.dumps({"event": "failed"}) + "\n")
    assert not head.send_log("an earlier launch", FIRST_GUEST, tail)
    assert head.send_log(served.own.run_id, FIRST_GUEST, tail)
    assert head.send_log(served.own.run_id, FIRST_GUEST, tail), "nothing is new"
    assert (tmp_path / f"generator-{FIRST_GUEST}.jsonl").read_text().count("failed") == 1


def test_a_guest_cannot_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_logs, "MAX_BYTES", 1000)
    guest, lines = Guest("lab", "", FIRST_GUEST, 2), [json.dumps({"event": "x" * 300})]
    logs = GuestLogs(tmp_path)
    with capture_logs() as said:
        for _ in range(9):
            logs.add(guest, GuestLog(FIRST_GUEST, lines))
        logs.add(guest, GuestLog(FIRST_GUEST + 1, lines))
        GuestLogs(tmp_path / "none").add(guest, GuestLog(FIRST_GUEST, lines))
    assert [path.stat().st_size < 1000 for path in tmp_path.glob("*.jsonl")] == [True, True]
    first, second = (entry["reason"] for entry in said)
    assert "at most 1000 are kept" in first and "No such file" in second


def test_a_guest_cannot_end_the_leases_of_others(served: Served) -> None:
    own, guest = GeneratorClient(served.own, 0), GeneratorClient(served.guest, FIRST_GUEST)
    (lease,) = ask(own, 1).leases
    guest.finish(make_group(lease, 0, generator=FIRST_GUEST))
    guest.release([(lease.ticket, lease.attempt, 3)])
    guest.close()
    status = served.status()
    assert (guest.unacknowledged, status["finished"], status["leased"], status["foreign_leases"]) == (0, 0, 1, 2)
    own.finish(make_group(lease, 0))
    own.close()
    assert served.status()["finished"] == 1


def test_a_revoked_guest_is_not_heard_and_not_let_in_again(served: Served) -> None:
    with closing(Connection(served.guest, linger_s=0.0)) as connection:
        assert connection.request(Lost(FIRST_GUEST), timeout_s=5.0).body == Ok({})
        served.write()
        with pytest.raises(PeerTimeoutError):
            connection.request(Lost(FIRST_GUEST), timeout_s=0.5)
    assert served.bad_messages() == 1
    strangers = served.status()["strangers"]
    assert is_refused(served.guest, Lost(FIRST_GUEST))
    assert (served.bad_messages(), served.status()["strangers"]) == (1, strangers + 1)
    served.write("lab")
    assert not is_refused(served.guest, Lost(FIRST_GUEST), timeout_s=5.0)


@pytest.mark.parametrize("name", FACTS)
def test_each_difference_is_refused_by_name(served: Served, name: str) -> None:
    problem = served.hello(FACTS | {name: "other"}).problem
    assert problem == f"{name} is other at the guest, {FACTS[name]} at the run"
    assert served.hello({"torch": FACTS["torch"]}).problem == "", "the model is told later"


@pytest.mark.parametrize("settings", [{}, {"weights__transport": "files"}])
def test_a_run_whose_weights_do_not_go_by_files_has_no_guests(served: Served) -> None:
    assert "start the run with weights.transport=files, and with weights.url" in served.hello().problem


@pytest.mark.parametrize("own_key", [True, False])
def test_without_the_run_id_nothing_but_a_guests_hello_is_heard(served: Served, own_key: bool) -> None:
    keys = served.own if own_key else served.guest
    assert is_refused(replace(keys, run_id=HELLO_ID), Hello(FACTS) if own_key else Lost(FIRST_GUEST))
    assert served.bad_messages() == 1


@pytest.mark.parametrize("text", ["", "[]", '{"guests": {"lab": {}}}', '{"guests": []}'])
def test_a_damaged_table_admits_nobody(served: Served, text: str) -> None:
    assert served.hello().problem == ""
    replace_file(served.table, text)
    assert is_refused(replace(served.guest, run_id=HELLO_ID), Hello(FACTS))


def test_guests_share_the_leases_and_a_silent_one_gives_its_back(tmp_path: Path) -> None:
    config = small_config(launch__heartbeat_timeout_s=50.0)
    queue = ReplayQueue(config, EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"))
    leases, _ = ask_queue(queue, FIRST_GUEST, 0, 4)
    assert len(leases) == 2, "half of what may start: there is a generator of the run's own, too"
    assert len(ask_queue(queue, 0, 0, 4)[0]) == 2
    queue.expire(queue.clock.now() + 40.0)
    assert queue.state.leased_by[FIRST_GUEST] == 2
    queue.expire(queue.clock.now() + 51.0)
    assert queue.state.leased_by[FIRST_GUEST] == 0 and str(FIRST_GUEST) not in queue.status()["generators"]
    again: list[Lease] = ask_queue(queue, 0, 0, 4)[0]
    assert {lease.ticket for lease in again} >= {lease.ticket for lease in leases}
    queue.close()


def test_guests_have_indices_of_their_own_and_are_not_scaled_away() -> None:
    assert FIRST_GUEST == MAX_GENERATORS
    guest = Guest("lab", "key", FIRST_GUEST, 2)
    assert [index for index in range(2000) if guest.owns(index)] == [FIRST_GUEST, FIRST_GUEST + 1]


def test_the_live_view_counts_guests_apart() -> None:
    status = {"generators": {"0": {}, "1": {}, str(FIRST_GUEST): {}}, "generators_wanted": 2, "catching_up": None}
    assert _disturbances(status, 0) == ["generators of guests 1"]
    assert _disturbances(status | {"generators_wanted": 3}, 0) == ["2 of 3 generators, generators of guests 1"]
