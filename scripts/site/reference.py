"""Reference pages made from the code: config keys, the Python API, and the parts that a user can replace."""

from __future__ import annotations

import asyncrl
from asyncrl.cli.show_config import Key, config_keys_of, written
from asyncrl.config.config import Config

API_MODULES = ("asyncrl.observe.sample_search.Query",)
"""Further objects that users of the API meet."""
SEAMS = {
    "Policy losses": ("asyncrl.algorithms.losses", ("PolicyTerms", "aggregate")),
    "Advantages": ("asyncrl.algorithms.advantages", ()),
    "Rewards": ("asyncrl.rewards.calling", ()),
    "Weight transports": ("asyncrl.weights.transports", ("Transport", "Link", "Member")),
    "Launchers": ("asyncrl.launch.launcher", ("LocalLauncher",)),
    "Trackers": ("asyncrl.observe.trackers", ("Tracker",)),
}
"""The module of each seam, whose docstring has an example, and the objects to show of it."""


def config_page() -> str:
    """Returns the page of all config keys, as `asyncrl config` prints them."""
    lines = [
        "# Config keys",
        "",
        "`asyncrl config` prints these keys with the values of a config. On the command line a key is written as "
        "`SECTION.KEY=VALUE`, in a YAML file as `SECTION: {KEY: VALUE}`.",
    ]
    section = None
    for key in config_keys_of(None, {}):
        if key.section != section:
            section = key.section
            lines += ["", f"## {section or 'Top level'}", "", _section_meaning(section), ""]
            lines += ["| key | default | accepts | meaning |", "|---|---|---|---|"]
        lines.append(_row(key, key.name))
        lines += [_row(option, f"{key.name}.{option.name}") for option in key.options]
    return "\n".join(lines) + "\n"


def _section_meaning(section: str) -> str:
    return " ".join((Config.model_fields[section].annotation.__doc__ or "").split()) if section else ""


def _row(key: Key, name: str) -> str:
    cells = [f"`{name}`", f"`{written(key.default)}`", key.rule, key.meaning]
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def api_page() -> str:
    """Returns the page of the public interface, `asyncrl.__all__`; its text comes from the docstrings."""
    lines = [
        "# Python API",
        "",
        "The names of the package `asyncrl`, as described in [Inspecting runs](runs.md#python).",
        "",
    ]
    for name in asyncrl.__all__:
        found = getattr(asyncrl, name)
        lines += _documented(f"{found.__module__}.{found.__qualname__}", name, members=name in ("Run", "Samples"))
    for path in API_MODULES:
        lines += _documented(path, path.rpartition(".")[2], members=True)
    return "\n".join(lines)


def parts_page() -> str:
    """Returns the page of the parts that a config may replace by the user's own."""
    text = "A config names a part of your own by `module:function` or `file.py:function`."
    lines = ["# Custom parts", "", text, ""]
    for title, (module, names) in SEAMS.items():
        lines += [f"## {title}", "", *_documented(module, module, members=False, level=3)]
        for name in names:
            lines += _documented(f"{module}.{name}", name, members=True, level=3)
    return "\n".join(lines)


def _documented(path: str, title: str, *, members: bool, level: int = 2) -> list[str]:
    options = {"heading": title, "heading_level": level, "members": "null" if members else "false"}
    return [f"::: {path}", "    options:", *(f"      {name}: {value}" for name, value in options.items()), ""]
