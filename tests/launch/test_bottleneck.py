"""The verdict on a live run takes as much work for a long run as for a short one."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from asyncrl.config.load import load_config
from asyncrl.launch import bottleneck
from asyncrl.launch.bottleneck import BottleneckMonitor
from asyncrl.launch.placement import place_roles
from asyncrl.plan import measured
from asyncrl.plan import measured as tail
from asyncrl.plan.verdict import Verdict
from tests.plan.made_runs import make_run

pytestmark = pytest.mark.timeout(240)

STATUS: dict[str, Any] = {
    "step": 5,
    "generator_idle": 0.2,
    "learner_idle": 0.01,
    "generator_environments": 0.0,
    "metrics": {},
    "collapse": {},
}
STEPS = 30


def monitor_of(folder: Path) -> BottleneckMonitor:
    config = load_config(folder / "config.yaml")
    return BottleneckMonitor(config, place_roles(config), first_s=0.0)


def verdict(monitor: BottleneckMonitor) -> str:
    monitor._next_s = 0.0
    deadline_s = time.monotonic() + 30
    while not (sentence := monitor.update(STATUS)):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    return sentence


def bytes_read() -> int:
    """Returns the bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_work_and_memory_do_not_grow_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measured, "MAX_GROUPS", 100)
    monkeypatch.setattr(tail, "METRICS_BYTES", 20_000)
    looks: list[list[int]] = []
    for factor in (1, 100):
        folder = make_run(Path("runs") / f"r{factor}", steps=STEPS * factor)
        table = pq.read_table(folder / "trace.parquet")
        pq.write_table(table, folder / "trace.parquet", row_group_size=1000)
        monitor = monitor_of(folder)
        verdict(monitor)
        looks.append([])
        for _ in range(2):
            before = bytes_read()
            assert "(simulated)" in verdict(monitor)
            looks[-1].append(bytes_read() - before)
    (short, long) = looks
    assert max(long) < min(short) + 400_000, looks


def test_the_smallest_factor_of_the_goodput_follows_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = monitor_of(make_run(Path("runs/r"), steps=STEPS))
    goodput = {"total": 0.36, "engine": 0.9, "admitted": 1.0, "signal": 0.4, "trained": 1.0}
    without = monitor.summary({"idle": {"generator": 0.2, "environments": 0.0, "learner": 0.01}})
    found = monitor.summary({"idle": {"generator": 0.2, "environments": 0.0, "learner": 0.01}, "goodput": goodput})
    assert found["bottleneck"].startswith(f"{without['bottleneck']}. Goodput 36%; its smallest factor is signal, 40%: ")
    assert "(simulated)" in without["bottleneck"] and found["simulated_gains"] == without["simulated_gains"]


def test_the_engines_thread_is_named_on_gpus_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_run(Path("runs/r"), steps=STEPS)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "generator/engine_cpu_fraction": 0.96}\n')
    summary = {"idle": {"generator": 0.2, "environments": 0.0, "learner": 0.01}}
    monitor = monitor_of(folder)
    assert "Python thread" not in monitor.summary(summary)["bottleneck"]
    monitor._has_gpus = True
    assert "Python thread and not for the GPU: it computes for 96%" in monitor.summary(summary)["bottleneck"]


def test_the_caller_does_not_wait_for_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    goes_on, threads = threading.Event(), list[str]()

    def simulate(*_: object, **__: object) -> Verdict:
        threads.append(threading.current_thread().name)
        goes_on.wait(20)
        return Verdict("balanced", "balanced", [])

    monkeypatch.setattr(bottleneck, "verdict_of", simulate)
    monitor = monitor_of(make_run(Path("runs/r")))
    assert monitor.update(STATUS | {"step": 0}) == "" and threads == [], "nothing to simulate yet"
    assert [monitor.update(STATUS) for _ in range(3)] == ["", "", ""]
    goes_on.set()
    assert verdict(monitor) == "balanced"
    assert monitor.update(STATUS) == "", "the next one is due in a minute"
    assert threads == ["bottleneck"]


def test_a_collapse_is_told_instead_and_no_change_makes_tokens_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = monitor_of(make_run(Path("runs/r"), steps=STEPS))
    summary = {
        "idle": {"generator": 0.2, "environments": 0.0, "learner": 0.01},
        "goodput": {"total": 0.36, "engine": 0.9, "admitted": 0.2, "signal": 0.4, "trained": 1.0},
    }
    collapse = {"active": True, "sentence": "collapsed at step 12: so."}
    sound, found = monitor.summary(summary), monitor.summary(summary | {"collapse": collapse})
    assert found["bottleneck"] == "collapsed at step 12: so."
    gains = sound["simulated_gains"]
    assert (
        found["simulated_gains"] == {name: gain for name, gain in gains.items() if "max_staleness" not in name} != gains
    )
    assert monitor.summary(summary | {"collapse": collapse | {"active": False}}) == sound
    monkeypatch.setitem(STATUS, "collapse", collapse)
    assert verdict(monitor) == "collapsed at step 12: so."
