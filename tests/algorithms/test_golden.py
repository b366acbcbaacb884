"""Losses and advantages against the results of other systems' functions for the same inputs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.algorithms import advantages, corrections, kl, losses
from asyncrl.algorithms.losses import aggregate

MODULES = {"advantages": advantages, "corrections": corrections, "kl": kl, "losses": losses}
HERE = Path(__file__).parent / "golden.json"
INTEGERS = {"seq", "group", "lengths"}

Case = dict[str, Any]


def find(call: str) -> Callable[..., Any] | None:
    module, _, function = call.partition(".")
    return getattr(MODULES.get(module), function, None)


def load() -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in json.loads(HERE.read_text())]


def tensors(case: Case) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor(value, dtype=torch.int64 if name in INTEGERS else torch.float64)
        for name, value in case["inputs"].items()
    }


@pytest.mark.parametrize("case", load())
def test_golden(case: Case) -> None:
    function, inputs, expect = find(case["call"]), tensors(case), case["expect"]
    assert function is not None
    close: dict[str, Any] = {"atol": case["atol"], "rtol": 0.0}
    gradient = next((key for key in expect if key.startswith("grad_")), None)
    if gradient:
        inputs[gradient.removeprefix("grad_")].requires_grad_()
    arguments = {name: inputs[name] for name in inspect.signature(function).parameters if name in inputs}
    result = function(**arguments, **case["options"])
    if gradient:
        token_loss = result * inputs.get("weights", torch.ones_like(result))
        loss = aggregate(token_loss, inputs["seq"], **case["aggregate"])
        loss.backward()
        torch.testing.assert_close(loss.item(), expect["loss"], **close)
        results, expected = (inputs[gradient.removeprefix("grad_")].grad,), (expect[gradient],)
    else:
        results, expected = result if isinstance(result, tuple) else (result,), tuple(expect.values())
    assert len(results) == len(expected)
    for given, numbers in zip(results, expected, strict=True):
        torch.testing.assert_close(given, torch.tensor(numbers, dtype=torch.float64), **close)


def test_all_cases_are_run() -> None:
    cases = json.loads(HERE.read_text())
    assert len(cases) == 57 and all(find(case["call"]) for case in cases)
    assert len({case["call"] for case in cases}) == 17
