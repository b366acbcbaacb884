"""The extension points: every table of parts that a config can name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.config import Config, unknown_name


def tables() -> dict[str, Mapping[str, Any]]:
    """Config key -> the table whose names it takes."""
    from asyncrl.algorithms.advantages import ADVANTAGES
    from asyncrl.algorithms.losses import LOSSES
    from asyncrl.launch.local import LAUNCHERS
    from asyncrl.observe.trackers import TRACKERS
    from asyncrl.rewards.load import REWARDS, load_reward
    from asyncrl.weights.transports import TRANSPORTS

    return {
        "rewards": {name: load_reward(name).function for name in REWARDS},
        "algorithm.advantage": ADVANTAGES,
        "algorithm.loss": LOSSES,
        "weights.transport": TRANSPORTS,
        "launch.cluster": LAUNCHERS,
        "observe.trackers": TRACKERS,
    }


def check_parts(config: Config) -> None:
    """Raises ConfigError for a transport, launcher or tracker that does not exist, or cannot do what the run asks."""
    from asyncrl.weights.transports import transport_of

    known = tables()
    named = {
        "weights.transport": [config.weights.transport] if config.weights.transport != "auto" else [],
        "launch.cluster": [config.launch.cluster],
        "observe.trackers": config.observe.trackers,
    }
    for key, names in named.items():
        for name in names:
            if name not in known[key]:
                raise unknown_name(key, name, known[key])
    transport_of(config)


def print_parts(console: Console) -> None:
    """Prints every table with each part's options and the first paragraph of its documentation."""
    for key, parts in tables().items():
        table = Table(title=key, title_justify="left", title_style="bold", box=None, padding=(0, 3, 0, 0))
        for name in ("name", "options", "what it is"):
            table.add_column(name, style="dim" if name == "options" else None)
        for name, part in parts.items():
            table.add_row(name, Text(_options(part)), Text(_what(part)))  # texts, as a string's [...] is markup
        console.print(table, "", sep="\n")


def _what(part: Any) -> str:
    what: str = getattr(part, "what", "") or inspect.getdoc(part) or ""
    return " ".join(what.partition("\n\n")[0].split())


def _options(part: Callable[..., Any]) -> str:
    from asyncrl.learner.algorithm import HIDDEN

    parameters = inspect.signature(part).parameters.values() if callable(part) else []
    options = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in HIDDEN]
    return ", ".join(f"{p.name}={p.default}" for p in options)
