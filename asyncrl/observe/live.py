"""The live view of a run: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
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
from asyncrl.types import GOODPUT_FACTORS, goodput_of
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
        self._history = RewardHistory(rewards)
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
        goodput, in_environments = goodput_of(status["metrics"]), status["generator_environments"]
        parts = [
            f"step {status['step']:>{len(str(self._steps))}}/{self._steps}",
            f"reward {_number(status['reward'], '.3f')}",
            f"staleness {self._staleness(status)}",
            f"{status['tokens_per_s']:,.0f} tok/s",
            *([f"goodput {goodput['total']:.0%}"] if goodput else []),
            f"idle: generators {status['generator_idle']:.0%}"
            + (f" (in environments {in_environments:.0%})" if in_environments else "")
            + f", learners {status['learner_idle']:.0%}",
            *([f"eval {evaluated}"] if (evaluated := evaluation_text(status)) else []),
            *([note] if (note := _disturbances(status, restarts)) else []),
        ]
        return "  ".join(parts)

    def _staleness(self, status: dict[str, Any]) -> str:
        """Staleness of trained tokens with its hard bound, and the admission limit when that is lower."""
        admitted = int(status["metrics"].get("replay/staleness_limit", self._max_staleness))
        now = f", {admitted} admitted" if admitted < self._max_staleness else ""
        return f"{status['staleness_mean']:.2f} (max {status['staleness_max']} of {self._max_staleness}{now})"

    def _panel(self, status: dict[str, Any], restarts: int) -> Panel:
        """The panel of a status, no higher than the terminal: where there is little room, the last sections and then
        the minor lines are left out."""
        width, metrics = self._console.size.width - 4, status["metrics"]
        alarm = status["collapse"]["sentence"] if status["collapse"].get("active") else ""
        room = width - QUESTION_CHARACTERS - 2
        staleness = self._staleness(status)
        if "staleness/in_flight" in metrics:
            in_flight, in_queue = metrics["staleness/in_flight"], metrics["staleness/in_queue"]
            staleness += f": {in_flight:.2f} in flight, {in_queue:.2f} in the queue"
        answers: Answers = {
            "Is it learning?": _learning(status, self._history, room),
            "How fast?": _speed(status, self._history, room),
            "What holds it back?": _waiting(status, "" if alarm else self._verdict),
            "How off-policy?": ([staleness], []),
        }
        warnings: Section = [Text(f"! {alarm}", style="bold red")] if alarm else []
        if note := _disturbances(status, restarts):
            warnings.append(Text(f"! {note}", style="bold yellow"))
        samples = _samples(self._samples, width)
        full: list[Section] = [[self._progress, _answers_table(answers, with_minor=True)], warnings]
        brief: list[Section] = [[self._progress, _answers_table(answers, with_minor=False)], warnings]
        layouts = [[*full, samples, _generators(status["generators"])], [*full, samples], [*brief, samples], brief]
        options = self._console.options.update(width=width, height=None)
        for layout in layouts:
            group = Group(*(part for section in layout if section for part in ("", *section)))
            group.renderables.pop(0)
            if len(self._console.render_lines(group, options)) <= self._console.size.height - 3:
                break
        return Panel(group, title=f"[bold]asyncrl[/] · {escape(self._run)}", border_style="blue")


def _disturbances(status: dict[str, Any], restarts: int) -> str:
    """Deviations from an undisturbed run, in one sentence: missing generators, restarts, steps trained again."""
    up, wanted, again = len(status["generators"]), status["generators_wanted"], status["catching_up"]
    parts = [f"{up} of {wanted} generators"] if up != wanted else []
    if restarts:
        parts.append(f"restarts {restarts}")
    if again:
        parts.append(f"training step {again['step']} of {again['of']} again")
    return ", ".join(parts)


BLOCKS = "▁▂▃▄▅▆▇█"
STEP_TIMES = 20
"""Latest steps whose duration is shown."""
BAR_CHARACTERS = 6
QUESTION_CHARACTERS = 19


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
Lines = tuple[list[RenderableType], list[RenderableType]]
"""The lines of an answer, and the minor ones, which are left out where there is little room."""
Answers = dict[str, Lines]


class RewardHistory:
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


def _answers_table(answers: Answers, *, with_minor: bool) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=QUESTION_CHARACTERS, style="bold cyan")
    table.add_column(ratio=1)
    for question, (lines, minor) in answers.items():
        for number, line in enumerate(lines + minor if with_minor else lines):
            table.add_row("" if number else question, line)
    return table


def _learning(status: dict[str, Any], history: RewardHistory, width: int) -> Lines:
    metrics, rewards = status["metrics"], history.rewards
    reward = Text.assemble("reward ", (_number(status["reward"], ".3f"), "bold green"))
    if len(rewards) > 1:
        first = sum(rewards[: (tenth := max(1, len(rewards) // 10))]) / tenth
        reward.append(f"  from {first:.3f}  ")
        reward.append(sparkline(rewards, max(8, min(60, width - len(reward)))), "green")
    lines: Section = [reward]
    if evaluated := evaluation_text(status):
        lines.append(f"evaluation {evaluated}")
    names = {"entropy": ("learner/entropy", ".3f"), "grad norm": ("learner/grad_norm", ".3g"),
             "completion tokens": ("completion/tokens", ",.0f")}  # fmt: skip
    facts = [f"{text} {metrics[name]:{form}}" for text, (name, form) in names.items() if name in metrics]
    return lines, [", ".join(facts)] if facts else []


def _speed(status: dict[str, Any], history: RewardHistory, width: int) -> Lines:
    speed = Text.assemble((f"{status['tokens_per_s']:,.0f}", "bold"), " trained tokens/s")
    if history.step_s is not None:
        speed.append(f", {history.step_s:.2g} s a step")
    lines: Section = [speed]
    if goodput := goodput_of(status["metrics"]):
        factors = " x ".join(f"{name} {goodput[name]:.0%}" for name in GOODPUT_FACTORS)
        smallest = min(GOODPUT_FACTORS, key=lambda name: goodput[name])
        text = Text.assemble("goodput ", (f"{goodput['total']:.0%}", "bold"), f" = {factors}")
        lines.append(
            text if len(text) <= width else f"goodput {goodput['total']:.0%}, {smallest} only {goodput[smallest]:.0%}"
        )
    groups = f"{status['leased']:,} being generated, {status['finished']:,} waiting, {status['trained']:,} trained"
    refunded = ", ".join(f"{number:,} {reason}" for reason, number in status["refunded"].items())
    return lines, [f"groups: {groups}" + (f", refunded {refunded}" if refunded else "")]


def _waiting(status: dict[str, Any], verdict: str) -> Lines:
    idle, metrics = Text(), status["metrics"]
    fractions = {"generators wait": status["generator_idle"], "in environments": status["generator_environments"],
                 "learners wait": status["learner_idle"]}  # fmt: skip
    for name, fraction in fractions.items():
        if fraction or name != "in environments":
            idle.append("  " if idle else "").append(f"{name} ").append(f"{fraction:.0%} ", "bold")
            idle.append(bar(fraction), "yellow")
    phases = {"generated": "generate", "in the queue": "queue", "trained": "train"}
    known = {word: metrics[f"group/{name}_s"] for word, name in phases.items() if f"group/{name}_s" in metrics}
    minor: Section = []
    if known:
        minor.append("a group is " + ", ".join(f"{word} {seconds:.2g} s" for word, seconds in known.items()))
    if "environment/live_episodes" in metrics:
        minor.append(_episodes(metrics))
    return [idle, *([Text(verdict, style="bold")] if verdict else [])], minor


def _episodes(metrics: Mapping[str, float]) -> str:
    live, waiting = (metrics[f"environment/{name}_episodes"] for name in ("live", "waiting"))
    text = f"{live:,.0f} episodes in progress, {waiting:,.0f} wait for environments"
    if "environment/turns" in metrics and "environment/wait_s/p95" in metrics:
        p50, p95 = (metrics[f"environment/wait_s/{name}"] for name in ("p50", "p95"))
        text += f"; {metrics['environment/turns']:.1f} turns, each episode waits {p50:.2g} s (95 %: {p95:.2g} s)"
    return text


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


def evaluation_text(status: dict[str, Any]) -> str:
    """The last evaluation and the one in progress; empty when there is neither."""
    last, running = status["eval"]["last"], status["eval"]["running"]
    parts = [f"{last.get('reward', math.nan):.3f} (version {last['version']})"] if last else []
    if running:
        parts.append(f"version {running[0]['version']}: {running[0]['done']} of {running[0]['prompts']} prompts")
    return ", ".join(parts)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
