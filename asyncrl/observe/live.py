"""The live view of a run: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from asyncrl.types import STALENESS_BUCKETS, STALENESS_METRICS

PLAIN_EVERY_S = 5.0
PLAIN_SAMPLES_EVERY_S = 20.0


class LiveView:
    """Shows the replay queue's status. Use as a context manager."""

    def __init__(self, console: Console, *, run: str, steps: int, max_staleness: int) -> None:
        self._console = console
        self._run = run
        self._steps = steps
        self._max_staleness = max_staleness
        self._last_line_s = 0.0
        self._last_step = -1
        self._verdict = ""
        self._samples: list[str] = []
        self._samples_s = -math.inf
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task(run, total=steps)
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
        """Shows the bottleneck sentence, until the next one."""
        if self._live is None and sentence != self._verdict:
            self._console.print(sentence, highlight=False, soft_wrap=True)
        self._verdict = sentence

    def show_samples(self, lines: list[str]) -> None:
        """Shows samples, until the next ones; without a terminal only some of them."""
        if not lines:
            return
        self._samples = lines
        if self._live is None and (now_s := time.monotonic()) - self._samples_s >= PLAIN_SAMPLES_EVERY_S:
            self._samples_s = now_s
            for line in lines:
                self._console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)

    def update(self, status: dict[str, Any], *, restarts: int = 0) -> None:
        """Shows a status of `LauncherClient.status` and the number of restarts."""
        if self._live is not None:
            self._progress.update(self._task, completed=status["step"])
            self._live.update(self._panel(status, restarts))
            return
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
            f"{status['tokens_per_s']:,.0f} tok/s  "
            f"idle: generators {status['generator_idle']:.0%}, learners {status['learner_idle']:.0%}"
            + _evaluated(status, "  eval ")
            + _disturbed(status, restarts, "  ")
        )

    def _staleness(self, status: dict[str, Any]) -> str:
        """Staleness of trained tokens with its hard bound, and the admission limit when that is lower."""
        admitted = int(status["metrics"].get("replay/staleness_limit", self._max_staleness))
        now = f", {admitted} admitted" if admitted < self._max_staleness else ""
        return f"{status['staleness_mean']:.2f} (max {status['staleness_max']} of {self._max_staleness}{now})"

    def _panel(self, status: dict[str, Any], restarts: int) -> Panel:
        main = Table.grid(padding=(0, 3))
        metrics = status["metrics"]
        refunded = ", ".join(f"{n} {reason}" for reason, n in status["refunded"].items()) or "none"
        main.add_row("reward", f"[bold green]{_reward(status)}", "trained tokens/s", f"{status['tokens_per_s']:,.0f}")
        main.add_row(
            "staleness",
            self._staleness(status),
            "groups",
            f"{status['leased']} leased, {status['finished']} waiting, {status['trained']} trained",
        )
        main.add_row("", _split(metrics), "a group is", _phases(metrics))
        main.add_row("learner idle", f"{status['learner_idle']:.0%}", "refunded", refunded)
        main.add_row(
            "entropy",
            f"{metrics.get('learner/entropy', float('nan')):.3f}",
            "gradient norm",
            f"{metrics.get('learner/grad_norm', float('nan')):.3g}",
        )
        if evaluated := _evaluated(status):
            main.add_row("eval", evaluated, "", "")
        if disturbed := _disturbed(status, restarts):
            main.add_row("roles", disturbed, "", "")
        roles = Table(box=None, pad_edge=False, header_style="dim")
        for title in ("generator", "version", "groups", "tokens", "idle"):
            roles.add_column(title, justify="left" if title == "generator" else "right")
        for index, g in status["generators"].items():
            roles.add_row(index, str(g["version"]), str(g["leased"]), f"{g['tokens']:,}", f"{g['idle']:.0%}")
        parts = [self._progress, main, "", roles, *_staleness_table(metrics)]
        if self._samples:
            parts += ["", *(Text(line, overflow="ellipsis", no_wrap=True) for line in self._samples)]
        if self._verdict:
            parts += ["", f"[bold]{self._verdict}"]
        return Panel(Group(*parts), title=f"asyncrl · {self._run}", border_style="blue")


def _split(metrics: dict[str, float]) -> str:
    if "staleness/in_flight" not in metrics:
        return ""
    return f"{metrics['staleness/in_flight']:.2f} in flight, {metrics['staleness/in_queue']:.2f} in the queue"


def _phases(metrics: dict[str, float]) -> str:
    """Mean seconds that the groups of the last step spent in each phase."""
    words = {"generate": "generated", "queue": "in the queue", "train": "trained"}
    return ", ".join(
        f"{word} {metrics[name]:.2g} s" for phase, word in words.items() if (name := f"group/{phase}_s") in metrics
    )


STALENESS_COLUMNS = {"tokens": "tokens_fraction", "ratio": "ratio_mean", "max": "ratio_max", "KL": "kl", "ESS": "ess"}
"""Column title -> metric."""


def _staleness_table(metrics: dict[str, float]) -> list[Any]:
    """The off-policy metrics of the last step by staleness."""
    buckets = [bucket for bucket in STALENESS_BUCKETS if f"staleness/{bucket}/ess" in metrics]
    if not buckets:
        return []
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("staleness")
    for title in (*STALENESS_COLUMNS, "clipped +/-", "masked +/-"):
        table.add_column(title, justify="right")
    for bucket in buckets:
        own = {name: metrics.get(f"staleness/{bucket}/{name}", float("nan")) for name in STALENESS_METRICS}
        cells = [
            f"{own[name]:.0%}" if name == "tokens_fraction" else f"{own[name]:.3g}"
            for name in STALENESS_COLUMNS.values()
        ]
        signs = [f"{own[f'{what}_positive']:.1%} {own[f'{what}_negative']:.1%}" for what in ("clip", "mask")]
        table.add_row(bucket, *cells, *(text.replace("nan%", "-") for text in signs))
    return ["", table]


def _reward(status: dict[str, Any]) -> str:
    return "-" if status["reward"] is None else f"{status['reward']:.3f}"


def _disturbed(status: dict[str, Any], restarts: int, before: str = "") -> str:
    """Deviations from an undisturbed run: missing generators, restarts, steps trained again; empty without any."""
    there, wanted, again = len(status["generators"]), status["generators_wanted"], status["catching_up"]
    parts = [f"{there} of {wanted} generators"] if there != wanted else []
    if restarts:
        parts.append(f"restarts {restarts}")
    if again:
        parts.append(f"training step {again['step']} of {again['of']} again")
    return before + ", ".join(parts) if parts else ""


def _evaluated(status: dict[str, Any], before: str = "") -> str:
    """The last evaluation and the one in progress; empty when there is neither."""
    last, running = status["eval"]["last"], status["eval"]["running"]
    parts = [f"{last['reward']:.3f} (version {last['version']})"] if last else []
    if running:
        parts.append(f"version {running[0]['version']}: {running[0]['done']} of {running[0]['prompts']} prompts")
    return before + ", ".join(parts) if parts else ""
