"""`asyncrl logs`: the logs of a run's roles, merged by time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from asyncrl.errors import ConfigError
from asyncrl.launch.run_dir import is_running
from asyncrl.launch.worker import ROLES
from asyncrl.observe.logs import LEVELS, LogEntry, RoleLog, merged
from asyncrl.util.text import did_you_mean, unknown_name

POLL_S = 0.3
KINDS = ("launcher", *ROLES)
"""Roles that a run may have, without their numbers."""
STYLES = {"warning": "yellow", "error": "red", "critical": "bold red"}


def show_logs(
    run_dir: Path,
    roles: Sequence[str],
    console: Console,
    *,
    follow: bool = False,
    level: str = "debug",
) -> None:
    """Prints the logs of these roles, or of all; with `follow` also new entries, until the run ends or Ctrl-C. Raises
    ConfigError for an unknown run, role or level."""
    if level not in LEVELS:
        raise unknown_name("--level", level, LEVELS)
    folder = run_dir / "logs"
    _check_run(run_dir)
    _check_roles(run_dir, roles, may_come=follow and is_running(run_dir))
    view = _View(folder, roles, console, level=level)
    try:
        while follow and is_running(run_dir):
            view.print_new()
            time.sleep(POLL_S)
        view.print_new(with_rest=True)
    except KeyboardInterrupt:
        return
    if follow:
        Console(stderr=True).print(f"{run_dir}: the run has ended", style="dim", highlight=False, soft_wrap=True)


class _View:
    """Prints the logs in a folder, in which files of further roles may appear."""

    def __init__(self, folder: Path, roles: Sequence[str], console: Console, *, level: str) -> None:
        self._folder, self._roles, self._console, self._level = folder, roles, console, level
        self._logs: dict[str, RoleLog] = {}
        self._width = 0
        """Characters of the longest role that was printed."""

    def print_new(self, *, with_rest: bool = False) -> None:
        """Prints the entries that came since the last time."""
        for path in sorted(self._folder.glob("*.jsonl")):
            if path.stem not in self._logs and _is_chosen(path.stem, self._roles):
                self._logs[path.stem] = RoleLog(path, level=self._level)
        self._width = max([self._width, *map(len, self._logs)])
        for entry in merged(self._logs.values(), with_rest=with_rest):
            self._print(entry)
        self._console.file.flush()

    def _print(self, entry: LogEntry) -> None:
        self._width = max(self._width, len(entry.role))
        text, style = entry.text(self._width), STYLES.get(entry.level)
        if style is None:
            print(text, file=self._console.file)  # not by rich, which takes a hundred times as long
        else:
            self._console.print(Text(text, style), soft_wrap=True)


def _is_chosen(name: str, roles: Sequence[str]) -> bool:
    """True for `generator-1` if the roles have it or `generator`, or are none."""
    return not roles or name in roles or name.rpartition("-")[0] in roles


def _check_run(run_dir: Path) -> None:
    if not (run_dir / "logs").is_dir():
        runs = sorted(folder.parent.name for folder in run_dir.parent.glob("*/logs"))
        raise ConfigError(
            f"{run_dir}: there is no such run{did_you_mean(run_dir.name, runs)} (of {', '.join(runs) or 'none'}); give "
            "its name in runs/, or the path of its folder"
        )


def _check_roles(run_dir: Path, roles: Sequence[str], *, may_come: bool) -> None:
    """Raises ConfigError for a role that has no log, unless it `may_come`: the run is followed, and may start it."""
    names = sorted({path.stem for path in (run_dir / "logs").iterdir() if path.suffix in (".jsonl", ".out")})
    for role in roles:
        known = any(_is_chosen(name, [role]) for name in names)
        if not known and not (may_come and role.partition("-")[0] in KINDS):
            kinds = sorted({name.rpartition("-")[0] or name for name in names})
            hint = did_you_mean(role, [*names, *kinds])
            raise ConfigError(f"{role}: {run_dir} has no such role{hint} (of {', '.join(names) or 'none'})")
