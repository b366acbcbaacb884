"""The extension points: the tables of parts that a config can name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.config.config import Config
from asyncrl.observe.console import say
from asyncrl.util.user_code import resolve

OF_THE_RUN = ("seed", "sent")
"""Keyword-only arguments of engines that the run sets."""
OWN_PARTS = "One of your own goes by module:function or file.py:function, wherever the config takes one of these names."
"""Printed below the tables: the form in which a config names a part of the user's own."""


def tables() -> dict[str, Mapping[str, Any]]:
    """Returns the table of every config key that names parts."""
    from asyncrl.algorithms.advantages import ADVANTAGES
    from asyncrl.algorithms.losses import LOSSES
    from asyncrl.data.custom import SEAMS
    from asyncrl.environments.table import ENVIRONMENTS, SCHEMES, find_environment, find_loader
    from asyncrl.generator.engine import ENGINES
    from asyncrl.generator.engine import KEY as ENGINE
    from asyncrl.launch.launcher import LAUNCHERS
    from asyncrl.observe.trackers import TRACKERS
    from asyncrl.rewards.table import REWARDS, load_reward
    from asyncrl.weights.transports import TRANSPORTS, find_transport

    return {
        "rewards": {name: load_reward(name).function for name in REWARDS},
        "environment.name": {name: find_environment(name) for name in ENVIRONMENTS}
        | {f"{scheme}:": find_loader(scheme) for scheme in SCHEMES},
        "data.custom": SEAMS,
        "algorithm.advantage": ADVANTAGES,
        "algorithm.loss": LOSSES,
        ENGINE: {name: resolve(ENGINE, name, ENGINES) for name in ENGINES},
        "weights.transport": {name: find_transport(name) for name in TRANSPORTS},
        "launch.cluster": {name: resolve("launch.cluster", name, LAUNCHERS) for name in LAUNCHERS},
        "observe.trackers": TRACKERS,
    }


def check_parts(config: Config) -> None:
    """Raises ConfigError for an engine, transport, launcher or tracker that does not exist or cannot be used in the
    run."""
    from asyncrl.generator.engine import find_engine
    from asyncrl.launch.launcher import find_launcher
    from asyncrl.observe.trackers import find_tracker
    from asyncrl.weights.transports import goes_by_files
    from asyncrl.weights.version_store import Folder

    find_launcher(config)
    find_engine(config)
    for name in config.observe.trackers:
        find_tracker(name)
    if goes_by_files(config) and config.weights.url:
        Folder(config.weights.url)


def print_parts(console: Console) -> None:
    """Prints every table with each part's options and the first paragraph of its documentation."""
    for key, parts in tables().items():
        table = Table(title=key, title_justify="left", title_style="bold", box=None, padding=(0, 3, 0, 0))
        for name in ("name", "options", "what it is"):
            table.add_column(name, style="dim" if name == "options" else None)
        for name, part in parts.items():
            table.add_row(name, Text(_options(part)), Text(_what(part)))  # texts, as a string's [...] is markup
        console.print(table, "", sep="\n")
    say(console, OWN_PARTS)


def _what(part: Any) -> str:
    what: str = getattr(part, "what", "") or inspect.getdoc(part) or ""
    return " ".join(what.partition("\n\n")[0].split())


def _options(part: Callable[..., Any]) -> str:
    from asyncrl.learner.algorithm import HIDDEN

    parameters = inspect.signature(part).parameters.values() if callable(part) else []
    options = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in (*HIDDEN, *OF_THE_RUN)]
    return ", ".join(f"{p.name}={p.default}" for p in options)
