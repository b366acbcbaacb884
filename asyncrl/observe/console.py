"""The launcher's console: exit codes, interrupts, output that survives a closed terminal, and the final summary."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

import structlog
from rich.console import Console
from rich.markup import escape

from asyncrl.observe.collapse import rollback_line
from asyncrl.types import GOODPUT_FACTORS

EXIT_DONE, EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 0, 1, 2, 130
TERM_S = 2.0
NOTICE_S = 240.0
"""Time to finish the step and save it after SIGUSR1."""


class Interrupts:
    """Counts SIGINT (Ctrl-C), SIGTERM and SIGHUP instead of raising in the middle of an operation.

    SIGTERM counts once in `TERM_S`: when the parent is killed, Linux sends the signal of PR_SET_PDEATHSIG again for
    each of the parent's threads that the process is handed to before the last of them ends. On `preemptible` hosts it
    counts twice, since little time is left, and SIGUSR1 counts once and requests a requeue.
    """

    def __init__(self, *, preemptible: bool = False) -> None:
        self.count = 0
        self.go_on_later = False
        self._preemptible = preemptible
        self._last_term_s = -math.inf

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Counts the signals inside the block; one that is ignored, as SIGHUP under nohup, stays ignored."""
        signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *([signal.SIGUSR1] if self._preemptible else [])]
        heard = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def limit_s(self, stop_timeout_s: float) -> float:
        """Returns the deadline for the request to stop."""
        return max(stop_timeout_s, NOTICE_S) if self.go_on_later else stop_timeout_s

    def _on_signal(self, number: int, _: object) -> None:
        now_s = time.monotonic()
        if number == signal.SIGUSR1:
            self.go_on_later, self.count = True, max(self.count, 1)
            return
        if number == signal.SIGTERM and self._preemptible:
            self.count = max(self.count, 1)
        if number != signal.SIGTERM or now_s - self._last_term_s > TERM_S:
            self.count += 1
        if number == signal.SIGTERM:
            self._last_term_s = now_s


log = structlog.get_logger()


class PipeSafeFile:
    """A file that drops its writes once they fail: the terminal was closed, or the pipe has no reader. Characters that
    its encoding lacks are escaped."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._gone = False

    def write(self, text: str) -> int:
        """Writes the text, or drops it; returns its length."""
        try:
            return len(text) if self._gone else self._file.write(text)
        except UnicodeEncodeError as error:
            return self.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except OSError as error:
            self._leave(error)
            return len(text)

    def flush(self) -> None:
        """Flushes the file; never raises OSError."""
        try:
            if not self._gone:
                self._file.flush()
        except OSError as error:
            self._leave(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _leave(self, error: OSError) -> None:
        self._gone = True
        # Python flushes the buffer at exit: let it go to /dev/null.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._file.fileno())
        os.close(nowhere)
        log.warning("the console is closed; its output is dropped", error=str(error))


def ignore_broken_pipe(console: Console) -> Console:
    """Makes the console drop its output once its terminal or pipe is closed; returns it."""
    console.file = cast(IO[str], PipeSafeFile(console.file))
    return console


def say(console: Console, text: str, style: str | None = None) -> None:
    """Prints a text as it is, without markup and line breaks."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def show_end(console: Console, summary: dict[str, Any]) -> None:
    """Prints how the run ended."""
    style = {"finished": "green", "failed": "bold red", "stopped": "yellow"}[summary["status"]]
    attempts = f" in {summary['attempts']} attempts" if summary["attempts"] > 1 else ""
    console.print(f"[{style}]{summary['status']}[/] after {summary['wall_s']:.0f} s{attempts}", highlight=False)
    if "error" in summary:
        say(console, summary["error"], "red")
    if {"reward_first", "ledger"} <= summary.keys():  # the replay queue may have ended the run
        console.print("\n".join(_lines(summary)), highlight=False, soft_wrap=True)
    for name, counts in summary.get("trackers", {}).items():
        text = f"trackers   {name}: {counts['failures']} failures, {counts['unsent_rows']} rows not received"
        say(console, text + (f": {counts['error']}" if "error" in counts else ""), "yellow")


def _lines(summary: dict[str, Any]) -> list[str]:
    ledger, staleness, sync = summary["ledger"], summary["staleness"], summary["weight_sync"]
    refunded = ", ".join(f"{n} refunded ({reason})" for reason, n in ledger["refunded"].items())
    lines = [
        f"reward     {summary['reward_first']:.3f} -> {summary['reward_last']:.3f} in {summary['steps']} steps",
        f"throughput {summary['tokens_per_s']:,.0f} trained tokens/s, {summary['tokens_trained']:,} in all",
        *_goodput(summary.get("goodput")),
        f"staleness  mean {staleness['mean']:.2f}, max {staleness['max']} (limit {staleness['limit']})",
        f"weights    {sync['count']} broadcasts, engine stalled {sync['stall_ms_mean']:.1f} ms "
        f"(max {sync['stall_ms_max']:.1f})",
        f"ledger     {ledger['leased']} groups = {ledger['trained']} trained + "
        + (f"{refunded} + " if refunded else "")
        + f"{ledger['in_flight']} in flight",
        *([f"rollbacks  {escape(line)}"] if (line := rollback_line(summary)) else []),
        *_verdict(summary["bottleneck"], summary.get("collapse", {})),
    ]
    if evaluations := summary.get("eval"):
        first, last = evaluations[0], evaluations[-1]
        versions = f"(version {first['version']} -> {last['version']})"
        rewards = " -> ".join(f"{result.get('reward', math.nan):.3f}" for result in (first, last))
        lines.insert(1, f"eval       reward {rewards} {versions}")
    for dropped in summary.get("eval_dropped", []):
        lines.append(f"eval       version {dropped['version']} dropped: {dropped['reason']}")
    if failed := summary.get("rewards_failed"):
        lines.append(
            f"failed     {failed:,} completions have no reward; see `asyncrl samples RUN --failed`, and the log"
        )
    if skipped := summary.get("skipped_updates"):
        lines.append(f"skipped    {skipped} updates whose loss or gradient was not finite; see logs/learner-0.jsonl")
    if any(summary["restarts"].values()):
        lines.append("restarts   " + ", ".join(f"{n} of {role}" for role, n in summary["restarts"].items() if n))
    lines += [f"bias       {sentence}" for sentence in summary["bias"]]
    if summary["skipped_rows"]:
        lines.append(f"skipped    {summary['skipped_rows']} prompts too long for the model's window")
    if summary["filtered_rows"]:
        lines.append(f"filtered   {summary['filtered_rows']} rows left out by data.custom.filter")
    return lines


def _verdict(bottleneck: str, collapse: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    if collapse and not collapse["stopped"]:  # the error has the sentence otherwise
        lines = [f"[{'bold red' if collapse['active'] else 'yellow'}]collapse   {escape(collapse['sentence'])}[/]"]
    return lines if bottleneck == collapse.get("sentence") else [*lines, f"bottleneck {bottleneck}"]


def _goodput(goodput: dict[str, float] | None) -> list[str]:
    if goodput is None:
        return []
    factors = " x ".join(f"{name} {goodput[name]:.0%}" for name in GOODPUT_FACTORS)
    return [f"goodput    {goodput['total']:.0%} of what bare engines make = {factors}"]
