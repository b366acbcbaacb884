"""The live view of a run: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from asyncrl.observe.curves import spread
from asyncrl.observe.document import duration
from asyncrl.types import GOODPUT_FACTORS, STALENESS_BUCKETS, STALENESS_METRICS, goodput_of
from asyncrl.util.text import shortened

PLAIN_EVERY_S = 5.0
PLAIN_SAMPLES_EVERY_S = 20.0


class LiveView:
    """Shows the replay queue's status. Use as a context manager."""

    def __init__(
        self, console: Console, *, run: str, steps: int, max_staleness: int, rewards: Sequence[float] = ()
    ) -> None:
        """`rewards` are the previous steps', in order."""
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


BLOCKS = "▁▂▃▄▅▆▇█"
MAX_HISTORY = 512
"""Rewards that are kept; when there are more, adjacent ones are replaced by their mean."""
STEP_TIMES = 20
"""Latest steps whose duration is shown."""
BAR_CHARACTERS = 6
QUESTION_CHARACTERS = 19
STALENESS_COLUMNS = {"tokens": "tokens_fraction", "ratio": "ratio_mean", "max": "ratio_max", "KL": "kl", "ESS": "ess"}
"""Column title -> metric."""


class ShownSample(NamedTuple):
    """A sample in the live view, safe for a terminal."""

    facts: str
    """Step, reward, staleness and length."""
    prompt: str
    completion: str

    @property
    def line(self) -> str:
        return f"{self.facts}  {self.prompt!r} -> {self.completion!r}"


Section = list[RenderableType]


class Line(NamedTuple):
    """A line of an answer."""

    text: RenderableType
    is_minor: bool = False
    """Left out where there is little room."""


class History:
    """The rewards of the steps so far, and how long the latest steps took."""

    def __init__(self, rewards: Sequence[float] = ()) -> None:
        """`rewards` are those of earlier steps."""
        self.rewards = list(rewards)
        self._times: deque[tuple[int, float]] = deque(maxlen=STEP_TIMES)
        self._step = 0

    def add(self, step: int, reward: float | None) -> None:
        """Records a status; only the first one after a step counts."""
        if step == self._step:
            return
        if step < self._step:
            self._times.clear()  # it was resumed from a checkpoint
        self._step = step
        self._times.append((step, time.monotonic()))
        if reward is not None:
            self.rewards.append(reward)
        if len(self.rewards) > MAX_HISTORY:
            self.rewards = spread(self.rewards, MAX_HISTORY // 2)

    @property
    def step_s(self) -> float | None:
        """Mean seconds of the latest steps; None if there are too few."""
        if len(self._times) < 2:
            return None
        (first, began_s), (last, ended_s) = self._times[0], self._times[-1]
        return (ended_s - began_s) / (last - first)


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as one line of blocks, from the lowest to the highest."""
    means = [value for value in spread(values, width) if math.isfinite(value)]
    if not means:
        return ""
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in means)


def bar(fraction: float) -> str:
    """A fraction as a bar."""
    full = round(min(max(fraction, 0.0), 1.0) * BAR_CHARACTERS)
    return "█" * full + "░" * (BAR_CHARACTERS - full)


def render_panel(
    status: dict[str, Any],
    *,
    console: Console,
    run: str,
    progress: Progress,
    history: History,
    staleness: str,
    verdict: str,
    notes: Sequence[str],
    samples: Sequence[ShownSample],
) -> Panel:
    """The panel of a status of `LauncherClient.status`, no higher than the terminal."""
    width = console.size.width - 4
    alarm = status["collapse"]["sentence"] if status["collapse"].get("active") else ""
    room = width - QUESTION_CHARACTERS - 2
    answers: list[tuple[str, list[Line]]] = [
        ("Is it learning?", _learning(status, history, room)),
        ("How fast?", _speed(status, history, room)),
        ("What holds it back?", _waiting(status, "" if alarm else verdict)),
        ("How off-policy?", [Line(staleness + _split(status["metrics"]))]),
    ]
    warnings: Section = [Text(f"! {alarm}", style="bold red")] if alarm else []
    warnings += [Text(f"! {note}", style="bold yellow") for note in notes]
    brief: list[Section] = [[progress, _table(answers, with_minor=False)], warnings]
    full: list[Section] = [[progress, _table(answers, with_minor=True)], warnings]
    written, generators = _samples(samples, width), _generators(status["generators"])
    layouts = [
        [*full, written, generators, _staleness_table(status["metrics"])],
        [*full, written, generators],
        [*full, written],
        [*brief, written],
        brief,
    ]
    title = f"[bold]asyncrl[/] · {escape(run)}"
    return Panel(_fitting(layouts, console, width), title=title, border_style="blue")


def _table(answers: list[tuple[str, list[Line]]], *, with_minor: bool) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=QUESTION_CHARACTERS, style="bold cyan")
    table.add_column(ratio=1)
    for question, lines in answers:
        for line in lines:
            if with_minor or not line.is_minor:
                table.add_row(question, line.text)
                question = ""
    return table


def _fitting(layouts: list[list[Section]], console: Console, width: int) -> Group:
    """The first layout that fits the terminal's height, or the last one, with a blank line between its sections."""
    options = console.options.update(width=width, height=None)
    group = Group()
    for sections in layouts:
        parts: list[RenderableType] = []
        for section in sections:
            parts += ([""] if parts and section else []) + section
        group = Group(*parts)
        if len(console.render_lines(group, options)) <= console.size.height - 3:
            break
    return group


def _learning(status: dict[str, Any], history: History, width: int) -> list[Line]:
    metrics, rewards = status["metrics"], history.rewards
    reward = Text.assemble("reward ", (_number(status["reward"], ".3f"), "bold green"))
    if len(rewards) > 1:
        first = sum(rewards[: (tenth := max(1, len(rewards) // 10))]) / tenth
        reward.append(f"  from {first:.3f}  ")
        reward.append(sparkline(rewards, max(8, min(60, width - len(reward)))), "green")
    lines = [Line(reward)]
    if evaluated := evaluation_text(status):
        lines.append(Line(f"evaluation {evaluated}"))
    names = {"entropy": ("learner/entropy", ".3f"), "grad norm": ("learner/grad_norm", ".3g"),
             "completion tokens": ("completion/tokens", ",.0f")}  # fmt: skip
    facts = [f"{text} {metrics[name]:{form}}" for text, (name, form) in names.items() if name in metrics]
    return [*lines, Line(", ".join(facts), is_minor=True)] if facts else lines


def _speed(status: dict[str, Any], history: History, width: int) -> list[Line]:
    speed = Text.assemble((f"{status['tokens_per_s']:,.0f}", "bold"), " trained tokens/s")
    if history.step_s is not None:
        speed.append(f", {history.step_s:.2g} s a step")
    text = (
        f"groups: {status['leased']:,} being generated, {status['finished']:,} waiting, {status['trained']:,} trained"
    )
    refunded = ", ".join(f"{number:,} {reason}" for reason, number in status["refunded"].items())
    groups = Line(text + (f", refunded {refunded}" if refunded else ""), is_minor=True)
    return [Line(speed), *_goodput_lines(status["metrics"], width), groups]


def _goodput_lines(metrics: dict[str, float], width: int) -> list[Line]:
    """The goodput with all its factors or, in little room, with the smallest one."""
    goodput = goodput_of(metrics)
    if "total" not in goodput:
        return []
    factors = " x ".join(f"{name} {goodput[name]:.0%}" for name in GOODPUT_FACTORS)
    smallest = min(GOODPUT_FACTORS, key=lambda name: goodput[name])
    for reason in (f" = {factors}", f", {smallest} only {goodput[smallest]:.0%}"):
        text = Text.assemble("goodput ", (f"{goodput['total']:.0%}", "bold"), reason)
        if len(text) <= width:
            break
    return [Line(text)]


def _waiting(status: dict[str, Any], verdict: str) -> list[Line]:
    idle = Text()
    fractions = {"generators wait": status["generator_idle"], "in environments": status["generator_environments"],
                 "learners wait": status["learner_idle"]}  # fmt: skip
    for name, fraction in fractions.items():
        if fraction or name != "in environments":
            idle.append("  " if idle else "").append(f"{name} ").append(f"{fraction:.0%} ", "bold")
            idle.append(bar(fraction), "yellow")
    lines = [Line(idle)]
    if verdict:
        lines.append(Line(Text(verdict, style="bold")))
    if phases := _phases(status["metrics"]):
        lines.append(Line(f"a group is {phases}", is_minor=True))
    if episodes := _episodes(status["metrics"]):
        lines.append(Line(episodes, is_minor=True))
    return lines


def _episodes(metrics: dict[str, float]) -> str:
    """The line about the episodes of the last step; empty without an environment."""
    if "environment/live_episodes" not in metrics:
        return ""
    live, waiting = (metrics[f"environment/{name}_episodes"] for name in ("live", "waiting"))
    text = f"{live:,.0f} episodes in progress, {waiting:,.0f} wait for environments"
    if "environment/turns" in metrics and "environment/wait_s/p95" in metrics:
        p50, p95 = (metrics[f"environment/wait_s/{name}"] for name in ("p50", "p95"))
        text += f"; {metrics['environment/turns']:.1f} turns, each episode waits {p50:.2g} s (95 %: {p95:.2g} s)"
    return text


def _split(metrics: dict[str, float]) -> str:
    if "staleness/in_flight" not in metrics:
        return ""
    return f": {metrics['staleness/in_flight']:.2f} in flight, {metrics['staleness/in_queue']:.2f} in the queue"


def _phases(metrics: dict[str, float]) -> str:
    """Mean seconds that the groups of the last step spent in each phase."""
    words = {"generate": "generated", "queue": "in the queue", "train": "trained"}
    return ", ".join(
        f"{word} {metrics[name]:.2g} s" for phase, word in words.items() if (name := f"group/{phase}_s") in metrics
    )


def _samples(samples: Sequence[ShownSample], width: int) -> Section:
    if not samples:
        return []
    lines: Section = [Text("What does it write?", style="bold cyan")]
    for sample in samples:
        lines.append(Text(f"  {sample.facts}", style="dim", no_wrap=True, overflow="ellipsis"))
        half = max(10, (width - 12) // 2)
        prompt = repr(shortened(sample.prompt, half))
        completion = repr(shortened(sample.completion, max(10, width - 10 - len(prompt))))
        text = Text.assemble(f"  {prompt} ", ("→ ", "dim"), (completion, "green"))
        text.no_wrap, text.overflow = True, "ellipsis"
        lines.append(text)
    return lines


def _generators(generators: dict[str, dict[str, Any]]) -> Section:
    if not generators:
        return []
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    titles = ["generator", "version", "groups", "tokens", "waits"]
    has_episodes = any(g["live_episodes"] or g["environments"] for g in generators.values())
    for title in (*titles, "in environments", "episodes", "waiting") if has_episodes else titles:
        table.add_column(title, justify="left" if title == "generator" else "right")
    for index, g in generators.items():
        cells = [index, str(g["version"]), str(g["leased"]), f"{g['tokens']:,}", f"{g['idle']:.0%}"]
        if has_episodes:
            cells += [f"{g['environments']:.0%}", f"{g['live_episodes']:,}", f"{g['waiting_episodes']:,}"]
        table.add_row(*cells)
    return [table]


def _staleness_table(metrics: dict[str, float]) -> Section:
    """The off-policy metrics of the last step by staleness."""
    buckets = [bucket for bucket in STALENESS_BUCKETS if f"staleness/{bucket}/ess" in metrics]
    if not buckets:
        return []
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
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
    return [table]


def evaluation_text(status: dict[str, Any]) -> str:
    """The last evaluation and the one in progress; empty when there is neither."""
    last, running = status["eval"]["last"], status["eval"]["running"]
    parts = [f"{last.get('reward', math.nan):.3f} (version {last['version']})"] if last else []
    if running:
        parts.append(f"version {running[0]['version']}: {running[0]['done']} of {running[0]['prompts']} prompts")
    return ", ".join(parts)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
