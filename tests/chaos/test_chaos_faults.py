"""Fault injection: stopped processes, full disks, flipped bits, clock jumps."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.runs import Chaos, check_complete
from tests.chaos.small_disk import SmallDisk

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1200)]

Make = Callable[..., Chaos]


def test_stopped_generator_does_not_stop_the_others(chaos: Make, figure: Callable[[str], None]) -> None:
    steps, timeout_s, heartbeat_s = 30, 3.0, 12.0
    run = chaos(
        "launch.generators=2",
        f"steps={steps}",
        f"weights.timeout_s={timeout_s}",
        f"launch.heartbeat_timeout_s={heartbeat_s}",
    )
    run.start()
    assert run.wait_for_step(4)
    stopped = run.roles()["generator-1"]
    os.kill(stopped, signal.SIGSTOP)
    longest_s, seen, since_s = 0.0, run.step, time.monotonic()
    while run.step < steps - 1:
        assert time.monotonic() - since_s < 60, f"no step for a minute at step {run.step}"
        if run.step > seen:
            longest_s, seen, since_s = max(longest_s, time.monotonic() - since_s), run.step, time.monotonic()
        time.sleep(0.05)
    summary = run.finish(timeout_s=120)
    check_complete(run, summary, steps)
    figure(
        f"longest wait for a step {longest_s:.1f} s with weights.timeout_s = {timeout_s:g} and "
        f"launch.heartbeat_timeout_s = {heartbeat_s:g}"
    )
    # A broadcast waits once for the stopped generator; the next batch may need prompts that it has leased until it
    # counts as dead.
    assert longest_s < timeout_s + heartbeat_s + 10


def test_full_disk_is_an_error_and_the_run_can_be_resumed(chaos: Make, demo_folder: Path, tmp_path: Path) -> None:
    steps = 40
    disk = SmallDisk(tmp_path / "runs", 400_000)
    try:
        (tmp_path / "demo").symlink_to(demo_folder / "demo")
        run = chaos(f"steps={steps}", "checkpoint.every_steps=1000", folder=tmp_path, seen_from=disk.root)
        code, output = run.start(prefix=disk.command(tmp_path)).end(timeout_s=200)
        assert code == 1, output
        assert "no space" in output.lower() and "resume" in output, output
        assert 0 < run.step < steps
        disk.grow(100_000_000)
        run.start(prefix=disk.command(tmp_path))
        check_complete(run, run.finish(timeout_s=200), steps)
    finally:
        disk.close()


def test_flipped_bits_in_the_journal(chaos: Make, figure: Callable[[str], None], full: bool) -> None:
    """Either the run continues normally, or it names the damaged file and continues from its checkpoint."""
    dice = random.Random(3)
    outcomes: list[str] = []
    for number in range(8 if full else 1):
        steps = 24
        run = chaos(f"steps={steps}", "checkpoint.every_steps=4", name=f"flipped-{number}")
        run.start()
        assert run.wait_for_step(10)
        run.kill_all()
        files = sorted(file for file in (run.run_dir / "journal").iterdir() if file.stat().st_size)
        file = dice.choice(files)
        flip(file, dice)
        code, output = run.start().end(timeout_s=200)
        if code:
            assert code in (1, 2) and file.stem in output and "--discard-journal" in output, output
            code, output = run.start("--discard-journal").end(timeout_s=200)
            assert code == 0, output
            outcomes.append("refused")
        else:
            outcomes.append("recovered")
        assert run.launched is not None
        check_complete(run, run.launched.summary(), steps)
    figure(f"{outcomes.count('recovered')} recovered, {outcomes.count('refused')} refused by name and resumed")


def flip(file: Path, dice: random.Random) -> None:
    data = bytearray(file.read_bytes())
    place = dice.randrange(len(data))
    data[place] ^= 1 << dice.randrange(8)
    file.write_bytes(data)


@pytest.mark.parametrize(("before_s", "after_s"), [(0, 100_000), (5_000, 0)])
def test_clock_jumps_between_two_launches(chaos: Make, before_s: int, after_s: int) -> None:
    """A restart of the machine changes its monotonic clock."""
    before, after = clock_ahead(before_s), clock_ahead(after_s)
    probe = subprocess.run([*before, *after, "true"], capture_output=True, text=True, timeout=10, check=False)
    if probe.returncode:
        pytest.skip(f"no time namespaces here: {probe.stderr.strip()}")
    steps = 20
    run = chaos(f"steps={steps}", name=f"clock{after_s - before_s}")
    run.start(prefix=before)
    assert run.wait_for_step(4)
    run.kill_all()
    run.start(prefix=after)
    summary = run.finish(timeout_s=200)
    check_complete(run, summary, steps)
    elapsed_s = [row["time/elapsed_s"] for row in run.rows()]
    assert all(0 <= b - a < 120 for a, b in itertools.pairwise(elapsed_s)), elapsed_s
    assert 0 < summary["wall_s"] < 400


def clock_ahead(seconds: int) -> tuple[str, ...]:
    """The command that starts another with the machine's monotonic clock ahead by this time."""
    return ("unshare", "-Ur", "-T", "--monotonic", str(seconds), "--boottime", str(seconds)) if seconds else ()
