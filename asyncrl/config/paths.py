"""Paths in a config, in which `~` and environment variables are expanded when it is read."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

from pydantic import BeforeValidator

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def expand_path(path: Any) -> Any:
    """The path with `~`, `~user`, `$NAME` and `${NAME}` replaced. Raises ValueError for a variable that is not set."""
    if not isinstance(path, str):
        return path

    def value_of(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in os.environ:
            raise ValueError(f"the environment variable {name} is not set; set it, or write the path out")
        return os.environ[name]

    return os.path.expanduser(_VARIABLE.sub(value_of, path))


LocalPath = Annotated[str, BeforeValidator(expand_path)]
"""A path in which `~` and environment variables are expanded."""
