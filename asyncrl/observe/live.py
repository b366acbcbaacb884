"""The live view of a run: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from asyncrl.observe.document import duration
from asyncrl.observe.panel import History, ShownSample, evaluation_text, render_panel
from asyncrl.types import goodput_of

PLAIN_EVERY_S = 5.0
PLAIN_SAMPLES_EVERY_S = 20.0


class LiveView:
    """Shows the replay queue's status. Use as a context manager."""

    def __init__(
        self, console: Console, *, run: str, steps: int, max_staleness: int, rewards: Sequence[float] = ()
    ) -> None:
        """`rewards` are those of the steps before, in order."""
        self._console = console
        self._run = run
        self._steps = steps
        self._max_staleness = max_staleness
        self._last_line_s = 0.0
        self._last_step = -1
        self._verdict = ""
        self._raised_step = 0
        self._history = History(rewards)
        self._samples: list[ShownSample] = []
        self._samples_s = -math.inf
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(separator=" / "),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[elapsed]}"),
            TextColumn("· left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task(run, total=steps, elapsed="")
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, text: str) -> None:
        """Shows what the run does before its first step."""
        if self._live is not None:
            self._live.update(Panel(text, title=f"asyncrl · {self._run}", border_style="blue"))
        else:
            self._console.print(text, highlight=False)

    def judge(self, sentence: str) -> None:
        """Shows the bottleneck sentence, until the next one; not while an alarm is active, which is shown."""
        if self._live is None and sentence != self._verdict and not self._raised_step:
            self._console.print(sentence, highlight=False, soft_wrap=True)
        self._verdict = sentence

    def show_samples(self, samples: list[ShownSample]) -> None:
        """Shows samples, until the next ones; without a terminal only some of them."""
        if not samples:
            return
        self._samples = samples
        if self._live is None and (now_s := time.monotonic()) - self._samples_s >= PLAIN_SAMPLES_EVERY_S:
            self._samples_s = now_s
            for sample in samples:
                self._console.print(f"  {sample.line}", highlight=False, markup=False, soft_wrap=True)

    def update(self, status: dict[str, Any], *, restarts: int = 0) -> None:
        """Shows a status of `LauncherClient.status` and the number of restarts."""
        if self._live is not None:
            elapsed = duration(status["metrics"].get("time/elapsed_s", 0.0))
            self._progress.update(self._task, completed=status["step"], elapsed=elapsed)
            self._history.add(status["step"], status["reward"])
            self._live.update(self._panel(status, restarts))
            return
        collapse = status["collapse"]
        raised_step = max(alarm["raised_step"] for alarm in collapse["alarms"]) if collapse.get("active") else 0
        if raised_step > self._raised_step:
            self._console.print(collapse["sentence"], style="bold red", highlight=False, markup=False, soft_wrap=True)
        self._raised_step = raised_step
        now_s = time.monotonic()
        step_ended = status["step"] != self._last_step
        due = now_s - self._last_line_s >= PLAIN_EVERY_S and (step_ended or status["eval"]["running"])
        if due or (step_ended and status["step"] == self._steps):
            self._last_line_s, self._last_step = now_s, status["step"]
            self._console.print(self._line(status, restarts), highlight=False, soft_wrap=True)

    def _line(self, status: dict[str, Any], restarts: int) -> str:
        return (
            f"step {status['step']:>{len(str(self._steps))}}/{self._steps}  reward {_reward(status)}  "
            f"staleness {self._staleness(status)}  "
            f"{status['tokens_per_s']:,.0f} tok/s  {_goodput(status)}"
            f"idle: generators {status['generator_idle']:.0%}{_in_environments(status)}, "
            f"learners {status['learner_idle']:.0%}"
            + (f"  eval {evaluated}" if (evaluated := evaluation_text(status)) else "")
            + "".join(f"  {note}" for note in _disturbances(status, restarts))
        )

    def _staleness(self, status: dict[str, Any]) -> str:
        """Staleness of trained tokens with its hard bound, and the admission limit when that is lower."""
        admitted = int(status["metrics"].get("replay/staleness_limit", self._max_staleness))
        now = f", {admitted} admitted" if admitted < self._max_staleness else ""
        return f"{status['staleness_mean']:.2f} (max {status['staleness_max']} of {self._max_staleness}{now})"

    def _panel(self, status: dict[str, Any], restarts: int) -> Panel:
        return render_panel(
            status,
            console=self._console,
            run=self._run,
            progress=self._progress,
            history=self._history,
            staleness=self._staleness(status),
            verdict=self._verdict,
            notes=_disturbances(status, restarts),
            samples=self._samples,
        )


def _reward(status: dict[str, Any]) -> str:
    return "-" if status["reward"] is None else f"{status['reward']:.3f}"


def _in_environments(status: dict[str, Any]) -> str:
    fraction = status["generator_environments"]
    return f" (in environments {fraction:.0%})" if fraction else ""


def _goodput(status: dict[str, Any]) -> str:
    total = goodput_of(status["metrics"]).get("total")
    return "" if total is None else f"goodput {total:.0%}  "


def _disturbances(status: dict[str, Any], restarts: int) -> list[str]:
    """Deviations from an undisturbed run, in one sentence: missing generators, restarts, steps trained again; none
    without any."""
    there, wanted, again = len(status["generators"]), status["generators_wanted"], status["catching_up"]
    parts = [f"{there} of {wanted} generators"] if there != wanted else []
    if restarts:
        parts.append(f"restarts {restarts}")
    if again:
        parts.append(f"training step {again['step']} of {again['of']} again")
    return [", ".join(parts)] if parts else []
