from __future__ import annotations

import pytest

from asyncrl.util import processes as stopwatch
from asyncrl.util.processes import ACTIVITIES, Stopwatch, fractions


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def test_all_time_is_in_one_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    watch = Stopwatch()
    clock.now_s += 1.0
    watch.switch("working")
    clock.now_s += 5.0
    assert watch.lap() == {"waiting": 1.0, "working": 5.0, "syncing": 0.0, "writing": 0.0}
    clock.now_s += 2.0
    watch.switch("syncing")
    clock.now_s += 2.0
    assert watch.lap() == {"waiting": 0.0, "working": 2.0, "syncing": 2.0, "writing": 0.0}
    assert watch.seconds() == {"waiting": 1.0, "working": 7.0, "syncing": 2.0, "writing": 0.0}
    parts = fractions(watch.seconds())
    assert parts == {"waiting": 0.1, "working": 0.7, "syncing": 0.2, "writing": 0.0, "seconds": 10.0}


def test_fractions_of_no_time_are_none() -> None:
    assert fractions(dict.fromkeys(ACTIVITIES, 0.0)) == dict.fromkeys([*ACTIVITIES, "seconds"], 0.0)
