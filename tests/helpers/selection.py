"""Which of a parametrized test's cases are slow, and which of them a session has selected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(quick: Iterable[str], names: Iterable[str]) -> list[Any]:
    """Returns the names as parameters, of which all but `quick` are marked slow."""
    kept, all_names = set(quick), list(names)
    assert kept <= set(all_names), kept - set(all_names)
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in all_names]


def selected_names(request: pytest.FixtureRequest, fixture: str) -> set[str]:
    """Returns the values of the parameter `name` of the selected tests that use `fixture`."""
    with_name = (
        item for item in request.session.items if "name" in getattr(getattr(item, "callspec", None), "params", {})
    )
    return {item.callspec.params["name"] for item in with_name if fixture in item.fixturenames}  # pyright: ignore
