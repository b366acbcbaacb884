"""The fate of the leases that a generator had when it died or fell silent, according to the journal of its run.

The run needs `journal.retention=all`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.replay.journal import read_journal
from asyncrl.replay.state import GroupEvent, LeaseEvent, Snapshot, event_of


@dataclass(frozen=True, slots=True)
class SecondAttempts:
    """Times are seconds after the generator was silent."""

    leases: int
    """Groups that it had."""
    leased_s: list[float]
    """When groups of them were leased again."""
    finished_s: list[float]
    """When groups arrived for them that were started again."""
    restarted_s: list[float]
    """When groups arrived that its own next session started."""

    def __str__(self) -> str:
        return (
            f"{len(self.leased_s)} of {self.leases} leases handed out again {first(self.leased_s)} after, first "
            f"new group of them {first(self.finished_s)} after, of its replacement {first(self.restarted_s)} after"
        )


def first(times_s: list[float]) -> str:
    return f"{min(times_s):.1f} s" if times_s else "never"


def second_attempts(run_dir: Path, generator: int, gone_s: float) -> SecondAttempts:
    """Reads the journal; `gone_s` is on this machine's monotonic clock."""
    had: dict[int, int] = {}
    sessions: dict[tuple[int, int], str] = {}
    found = SecondAttempts(0, [], [], [])
    origin_s, own = 0.0, ""
    leases = 0
    folder = run_dir / "journal"
    for location, record in read_journal(folder):
        match event_of(record, location, folder):
            case Snapshot() as snapshot:
                origin_s = snapshot.origin_s
            case LeaseEvent() as lease:
                after_s = lease.at_s - (gone_s - origin_s)
                for ticket, attempt in lease.tickets:
                    sessions[ticket, attempt] = lease.session if lease.generator == generator else ""
                    if after_s > 0 and had.get(ticket, attempt) < attempt:
                        found.leased_s.append(after_s)
                    elif after_s <= 0 and lease.generator == generator:
                        had[ticket], own = attempt, lease.session
                    elif after_s <= 0:
                        had.pop(ticket, None)
            case GroupEvent(header):
                ticket, attempt = header.ticket, header.attempt
                after_s = header.finished_s - (gone_s - origin_s)
                if after_s <= 0:
                    had.pop(ticket, None)
                elif had.get(ticket, attempt) < attempt:
                    found.finished_s.append(after_s)
                if after_s > 0 and sessions.get((ticket, attempt), own) not in ("", own):
                    found.restarted_s.append(after_s)
            case _:
                pass
        leases = len(had)
    return SecondAttempts(leases, found.leased_s, found.finished_s, found.restarted_s)


def stop_with_leases(run_dir: Path, generator: int, processes: Sequence[int]) -> float:
    """Stops processes, among them a generator's, at a moment at which it has leases. Returns the time of the monotonic
    clock."""
    for _ in range(100):
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        time.sleep(0.2)  # what it has sent arrives
        if second_attempts(run_dir, generator, time.monotonic()).leases:
            return stopped_s
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)
    raise AssertionError(f"generator {generator} never has leases")
