"""Quantities with a unit, as they are given on the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from asyncrl.errors import ConfigError

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
BYTES_PER_S = {"kb/s": 1e3 / 8, "Mb/s": 1e6 / 8, "Gb/s": 1e9 / 8}
"""Bytes per second of the units of links, which are bits."""


def seconds_of(option: str, text: str) -> float:
    """Returns the seconds of a duration such as 10m. Raises ConfigError that names the option."""
    return _quantity(option, text, SECONDS, example="10m")


def bytes_per_s_of(option: str, text: str) -> float:
    """Returns the bytes per second of a link such as 20Mb/s, which is in bits. Raises ConfigError that names the
    option."""
    return _quantity(option, text, BYTES_PER_S, example="20Mb/s")


def _quantity(option: str, text: str, units: Mapping[str, float], *, example: str) -> float:
    found = re.fullmatch(r"([0-9.]+)\s*([a-zA-Z/]+)", text.strip())
    try:
        value = float(found[1]) * units[found[2]] if found else math.nan
    except (ValueError, KeyError):
        value = math.nan
    if not 0 < value < math.inf:
        names = ", ".join(units)
        raise ConfigError(f"{option} {text}: must be a number above 0 with a unit, one of {names}, as in {example}")
    return value
