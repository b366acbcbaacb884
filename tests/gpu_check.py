"""`python -m tests.gpu_check [--out FILE]` runs what only a GPU can show, stage by stage, and prints a table.

Each stage is a process with a deadline, so that one which hangs or crashes is one line. Checks of missing hardware are
skipped with the reason: vLLM, a second GPU, a GPU at all. Needs no installation beyond what a check imports:
PYTHONPATH=. is enough. The results go to `benchmarks/results/CARD.json`, or to FILE, each with the commit that was
checked; those of stages that do not run stay there. `docs/gpus.md` shows them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl.cli.planning import python_path
from benchmarks.frame import origin_here

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
REPORT = "ASYNCRL_GPU_REPORT"
"""Environment variable with the file to which a stage reports each check, by `tests/gpu/conftest.py`."""
END_S = 20.0
"""Time that a stage has to end after its deadline."""
TAIL_LINES = 40


@dataclass(frozen=True)
class Stage:
    """Checks that run in one process."""

    name: str
    file: str
    limit_s: float
    select: str = ""
    """The names of its checks, as pytest's option `-k` selects them."""
    alone: bool = False
    """True if it measures time or the memory of the card, and so runs when no other stage does."""


STAGES = (
    Stage("learner", "test_gpu_learner.py", 420),
    Stage("weights", "test_gpu_weights.py", 180),
    Stage("transformers", "test_gpu_engine.py", 300, "transformers"),
    Stage("vLLM", "test_gpu_engine.py", 900, "vllm"),
    Stage("run", "test_gpu_run.py", 900, "demo"),
    Stage("adapters", "test_gpu_run.py", 900, "adapters"),
    Stage("colocated", "test_gpu_colocated.py", 1200, "demo"),
    Stage("card memory", "test_gpu_colocated.py", 300, "not demo", alone=True),
    Stage("figures", "test_gpu_figures.py", 300, alone=True),
)


@dataclass
class Check:
    """The outcome of a check."""

    stage: str
    name: str
    outcome: str
    """passed, failed or skipped."""
    reason: str = ""
    """Why it was skipped, or the end of its failure."""
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    commit: str = ""


def main() -> int:
    """Returns 0 if no check failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_check", description="Checks of what only a GPU can show")
    parser.add_argument("--out", type=Path, help="file for the results; benchmarks/results/CARD.json")
    parser.add_argument("--stage", action="append", choices=[stage.name for stage in STAGES], help="only this one")
    parser.add_argument("--parallel", type=int, default=1, help="stages that run at a time")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="deadline of all stages together")
    arguments = parser.parse_args()
    stages = [stage for stage in STAGES if not arguments.stage or stage.name in arguments.stage]
    started = time.monotonic()
    checks = run_stages(stages, arguments.parallel, arguments.limit_s)
    print_table(stages, checks)
    origin = asdict(origin_here())
    cards = origin["machine"]["gpus"]
    out = arguments.out or (RESULTS / f"{slug(cards[0])}.json" if cards else None)
    if out is not None:
        before = json.loads(out.read_text())["checks"] if out.exists() else []
        seconds = round(time.monotonic() - started)
        now = [asdict(replace(check, commit=origin["commit"])) for check in checks]
        results = {**origin, "seconds": seconds, "checks": updated(before, now)}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"written to {out}")
    print(last_line(checks))
    return int(any(check.outcome == "failed" for check in checks))


def run_stages(stages: list[Stage], parallel: int, limit_s: float) -> list[Check]:
    """Runs the stages, `parallel` of them at a time, and returns their checks in the order of the stages. After
    `limit_s` those that run are ended."""
    waiting, running = list(stages), list[Running]()
    end_s = time.monotonic() + limit_s
    found: dict[str, list[Check]] = {}
    while waiting or running:
        while waiting and len(running) < parallel and not (waiting[0].alone and running):
            running.append(Running(waiting.pop(0), end_s))
        for one in list(running):
            if one.has_ended():
                running.remove(one)
                found[one.stage.name] = one.checks()
                print_stage(one.stage, found[one.stage.name])
        time.sleep(0.1)
    return [check for stage in stages for check in found[stage.name]]


class Running:
    """A stage in progress."""

    def __init__(self, stage: Stage, end_s: float) -> None:
        """`end_s` is the time (`time.monotonic`) at which it is ended, unless its own deadline is earlier."""
        self.stage = stage
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-check-")
        self._report = Path(self._folder.name) / "report.jsonl"
        self._output = (Path(self._folder.name) / "output").open("w+b")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"tests/gpu/{stage.file}", "-p", "no:randomly", "-q"]
        self._started_s = time.monotonic()
        self._end_s = min(end_s, self._started_s + stage.limit_s)
        self._process = subprocess.Popen(
            [*command, "--tb=short", "-k", stage.select],
            cwd=ROOT,
            env=os.environ | {REPORT: str(self._report), "ASYNCRL_MAY_SKIP": "1", "PYTHONPATH": python_path()},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._late = False

    def has_ended(self) -> bool:
        """True if its process has ended, by itself or, after its deadline, by a signal."""
        if self._process.poll() is None and time.monotonic() > self._end_s:
            self._late = True
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(END_S)
        return self._process.poll() is not None

    def checks(self) -> list[Check]:
        """Returns its checks; those that it had not reported when it ended have failed."""
        lines = [json.loads(line) for line in self._report.read_text().splitlines()] if self._report.exists() else []
        names = lines[0]["names"] if lines else []
        done = {line["name"]: Check(stage=self.stage.name, **line) for line in lines[1:]}
        ended = f"exit code {self._process.returncode}"
        if self._late:
            ended = f"it did not end within {self._end_s - self._started_s:.0f} s"
        if not names or (missing := [name for name in names if name not in done]):
            for name in missing if names else [self.stage.file]:
                done[name] = Check(self.stage.name, name, "failed", f"the stage ended without it: {ended}")
            self._output.seek(0)
            print(*self._output.read().decode(errors="replace").splitlines()[-TAIL_LINES:], sep="\n")
        self._output.close()
        self._folder.cleanup()
        return [done[name] for name in names or done]


def updated(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the checks of the last run and, of those before it, the ones of other stages, in the order of the stages.
    Checks of stages that there are no longer are left out."""
    stages, names = {check["stage"] for check in now}, {check["name"] for check in now}
    kept = [check for check in before if check["stage"] not in stages and check["name"] not in names]
    order = [stage.name for stage in STAGES]
    return sorted(
        (check for check in now + kept if check["stage"] in order), key=lambda check: order.index(check["stage"])
    )


def counts(checks: list[Check]) -> str:
    """The number of checks by outcome, such as "11 passed, 0 failed, 1 skipped"."""
    found = Counter(check.outcome for check in checks)
    return ", ".join(f"{found[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))


def last_line(checks: list[Check]) -> str:
    """The sum of all stages, with the reasons of skipped checks."""
    ran = sum(check.outcome != "skipped" for check in checks)
    reasons = Counter(check.reason for check in checks if check.outcome == "skipped")
    why = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
    return f"ran {ran} of {len(checks)} checks: {counts(checks)}" + (f" ({why})" if why else "")


def print_stage(stage: Stage, checks: list[Check]) -> None:
    """Prints the outcome of a stage, its figures and its failures."""
    print(f"{stage.name}: {counts(checks)}")
    for check in checks:
        for name, value in check.figures.items():
            print(f"  {name}: {value:,.4g}")
        if check.outcome == "failed":
            print(f"  FAILED {check.name}\n    {check.reason}")
    sys.stdout.flush()


def print_table(stages: list[Stage], checks: list[Check]) -> None:
    """Prints a row for each stage."""
    print(f"\n{'stage':<16}{'checks':>8}{'passed':>8}{'failed':>8}{'skipped':>9}{'s':>8}")
    for stage in stages:
        own = [check for check in checks if check.stage == stage.name]
        found = Counter(check.outcome for check in own)
        numbers = f"{found['passed']:>8}{found['failed']:>8}{found['skipped']:>9}"
        print(f"{stage.name:<16}{len(own):>8}{numbers}{sum(check.seconds for check in own):>8.0f}")


def slug(card: str) -> str:
    """The name of a card as a file name: `nvidia-h200` for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


def report(line: dict[str, Any]) -> None:
    """Appends a line to the report of this stage, if it is run by `make gpu-check`."""
    if path := os.environ.get(REPORT):
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
