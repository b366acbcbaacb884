"""Numbers that other systems' own functions gave for the same inputs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.algorithms import advantages, corrections, losses
from asyncrl.algorithms.losses import aggregate

MODULES = {"advantages": advantages, "corrections": corrections, "losses": losses}
HERE = Path(__file__).parent / "golden.json"
SHARED = Path(__file__).parents[3] / "shared" / "golden" / "cases.json"
INTEGERS = {"seq", "group", "lengths"}

Case = dict[str, Any]


def find(call: str) -> Callable[..., torch.Tensor] | None:
    module, _, function = call.partition(".")
    return getattr(MODULES.get(module), function, None)


def load() -> list[Any]:
    """The cases kept here, and those of a `shared` folder beside the repository whose function exists."""
    cases: list[Case] = json.loads(HERE.read_text())
    if SHARED.exists():
        known = {case["name"] for case in cases}
        cases += [case for case in json.loads(SHARED.read_text()) if case["name"] not in known]
    return [pytest.param(case, id=case["name"]) for case in cases if find(case["call"])]


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
    if "logprobs" in inputs:
        inputs["logprobs"].requires_grad_()
    arguments = {name: inputs[name] for name in inspect.signature(function).parameters if name in inputs}
    result = function(**arguments, **case["options"])
    if "grad_logprobs" in expect:
        token_loss = result * inputs.get("weights", torch.ones_like(result))
        loss = aggregate(token_loss, inputs["seq"], **case["aggregate"])
        loss.backward()
        torch.testing.assert_close(loss.item(), expect["loss"], **close)
        result, expected = inputs["logprobs"].grad, expect["grad_logprobs"]
    else:
        (expected,) = expect.values()
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), **close)


def test_every_function_here_has_golden_cases() -> None:
    kept = {case["call"] for case in json.loads(HERE.read_text())}
    assert len(kept) == 7 and all(find(call) for call in kept)
