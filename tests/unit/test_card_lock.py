"""The lock of a card, between processes: one holder, released by its death, handed over when it is asked for."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.errors import PeerTimeoutError
from asyncrl.util.locks import CardLock, Cards, CardWait, card_path

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from asyncrl.util.locks import CardLock
lock = CardLock(Path(sys.argv[1]), sys.argv[2])
lock.acquire(10)
child = os.fork()  # does not keep the lock
if child == 0:
    time.sleep(60)
print("held", child, flush=True)
for line in sys.stdin:
    match line.strip():
        case "progress": lock.note_progress()
        case "release": lock.release()
        case "wanted": print(lock.is_wanted, flush=True); continue
        case "leave": lock.leave()
        case "visit": lock.visit(10)
        case "end visit": lock.end_visit()
        case "acquire": print(lock.try_acquire(), flush=True); continue
    print("done", flush=True)
"""


class Holder:
    def __init__(self, path: Path, name: str) -> None:
        command = [sys.executable, "-c", HOLDER, str(path), name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.child = int(self._read().split()[1])

    def tell(self, word: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        subprocess.run(["kill", "-9", str(self.child)], check=False)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Holder]]:
    holders: list[Holder] = []

    def begin(name: str) -> Holder:
        holders.append(Holder(card_path(tmp_path, 0), name))
        return holders[-1]

    yield begin
    for holder in holders:
        holder.close()


def test_one_role_has_the_card_until_it_releases_it_or_dies(start: Callable[[str], Holder], tmp_path: Path) -> None:
    lock = CardLock(card_path(tmp_path, 0), "learner-0")
    holder = start("generator-0")
    assert not lock.try_acquire() and lock.last == "generator-0"
    with pytest.raises(PeerTimeoutError, match=rf"card-0 \(generator-0, process {holder.process.pid}\).*within 0.2 s"):
        lock.acquire(0.2)
    holder.process.send_signal(signal.SIGKILL)
    holder.process.wait()
    lock.acquire(5)  # its child lives on
    assert lock.held and lock.last == "learner-0"
    lock.release()
    lock.leave()
    lock.leave()
    assert CardLock(card_path(tmp_path, 0), "other").last == "", "the one that left counts no more"


def test_progress_of_the_holder_extends_the_wait(start: Callable[[str], Holder], tmp_path: Path) -> None:
    holder = start("generator-0")
    lock = CardLock(card_path(tmp_path, 0), "learner-0")
    wait, end_s = CardWait(lock, 0.3), time.monotonic() + 1.0
    while time.monotonic() < end_s:
        assert holder.tell("progress") == "done"
        wait.check()
    time.sleep(0.35)
    with pytest.raises(PeerTimeoutError):
        wait.check()


def test_nobody_acquires_a_card_on_which_another_role_has_memory(
    start: Callable[[str], Holder], tmp_path: Path
) -> None:
    holder = start("generator-0")
    holder.tell("release")
    learner = CardLock(card_path(tmp_path, 0), "learner-0")
    assert learner.try_acquire()
    assert holder.tell("visit") == "done" and holder.tell("acquire") == "False"
    learner.release()
    with pytest.raises(PeerTimeoutError, match="another role has memory on it"):
        learner.acquire(0.1)
    assert holder.tell("acquire") == "True", "the visitor has it next"
    holder.tell("release")
    assert learner.try_acquire(), "the visit has ended with that"
    learner.release()
    holder.tell("visit")
    assert not learner.try_acquire()
    holder.tell("end visit")
    assert learner.try_acquire()
    learner.release()
    holder.tell("visit")
    holder.process.send_signal(signal.SIGKILL)
    holder.process.wait()
    assert learner.try_acquire()


def test_a_role_that_starts_asks_for_the_card(start: Callable[[str], Holder], tmp_path: Path) -> None:
    holder = start("generator-0")
    assert holder.tell("wanted") == "False"
    code = "import sys; from pathlib import Path; from asyncrl.util.locks import CardLock; "
    code += "CardLock(Path(sys.argv[1]), 'learner-0').acquire(20)"
    other = subprocess.Popen([sys.executable, "-c", code, str(card_path(tmp_path, 0))])
    end_s = time.monotonic() + 20
    while holder.tell("wanted") == "False":
        assert time.monotonic() < end_s
    holder.tell("release")
    assert other.wait(20) == 0


def test_the_other_has_its_turn_between_two_of_one_role(start: Callable[[str], Holder], tmp_path: Path) -> None:
    lock = CardLock(card_path(tmp_path, 0), "learner-0")
    lock.acquire(5)
    lock.release()
    with pytest.raises(PeerTimeoutError):
        lock.acquire(0.1, in_turn=True)
    lock.acquire(0.1)
    lock.release()
    holder = start("generator-0")
    holder.tell("release")
    lock.acquire(5, in_turn=True)
    lock.release()
    other = start("generator-0")
    other.tell("leave")
    lock.acquire(5, in_turn=True)  # of one that has left there is no turn to wait for


def test_all_cards_or_none(start: Callable[[str], Holder], tmp_path: Path) -> None:
    holder = start("learner-0")  # has card 0
    names = [card_path(tmp_path, number) for number in (1, 0)]
    cards = Cards([CardLock(path, "generator-0") for path in names])
    assert not cards.try_acquire()
    code = "import sys; from pathlib import Path; from asyncrl.util.locks import CardLock; "
    code += "sys.exit(not CardLock(Path(sys.argv[1]), 'learner-1').try_acquire())"
    other = [sys.executable, "-c", code, str(names[0])]
    assert subprocess.run(other, check=False).returncode == 0, "card 1 was kept without card 0"
    holder.tell("release")
    assert cards.try_acquire()
    assert subprocess.run(other, check=False).returncode == 1
