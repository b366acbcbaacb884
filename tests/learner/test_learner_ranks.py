"""Two ranks produce the results of one rank, at every ZeRO stage; an error of one rank is raised on all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from worlds import CRITIC, LORA, LR, MAX_GRAD_NORMS, SKIPS, endpoints, make_config, make_groups, record

from asyncrl.errors import PeerTimeoutError
from asyncrl.learner.distributed import Ranks, process_group
from tests.helpers.selection import slow_except

FLOAT32 = ["zero0", "zero2", "zero3", "offload-zero2", "offload-zero3"]
BFLOAT16 = ["bfloat16-zero0", "bfloat16-zero2", "bfloat16-zero3", "bfloat16-offload1"]
WITH_ADAPTERS = ["lora-zero2", "lora-zero3"]
WITH_CRITIC = ["critic-zero0", "critic-zero3"]
QUICK = {"alone", "zero3", "lora-zero2", "critic-zero3", "epochs", "bfloat16-zero2-optimizer"}

Record = tuple[dict[str, Tensor], dict[str, float]]


def cases(*names: str) -> list[Any]:
    return slow_except(QUICK.intersection(names), names)


def load(folder: Path, name: str, rank: int) -> Record:
    scalars = json.loads((folder / f"{name}-{rank}.json").read_text())
    return load_file(folder / f"{name}-{rank}.safetensors"), scalars


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@pytest.fixture(scope="module")
def alone(one_rank: Ranks, tiny_model: Path) -> Record:
    config = make_config(tiny_model)
    return record(config, one_rank, make_groups())


@pytest.fixture(scope="module")
def alone_with_critic(one_rank: Ranks, tiny_model: Path) -> Record:
    return record(make_config(tiny_model, **CRITIC), one_rank, make_groups())


@pytest.mark.parametrize("name", cases(*FLOAT32, *WITH_CRITIC, "dropped-zero3"))
def test_two_ranks_are_one_rank(name: str, alone: Record, alone_with_critic: Record, two_ranks: Path) -> None:
    if name.startswith("critic"):
        alone = alone_with_critic
        assert "2/critic/explained_variance" in alone[1] and "2/kl/reference" in alone[1]
    tensors, scalars = load(two_ranks, name, 0)
    for step in (1, 2):
        expected = part(alone[0], f"gradient/{step}/")
        for parameter, gradient in part(tensors, f"gradient/{step}/").items():
            torch.testing.assert_close(gradient, expected.pop(parameter), atol=1e-6, rtol=1e-4)
        assert not expected
        # Adam's first steps are nearly lr * sign(gradient), even if the gradient consists of rounding errors only.
        firm = {n: g.abs() > 1e-5 for n, g in part(alone[0], f"gradient/{step}/").items()}
        for parameter, weight in part(alone[0], f"weight/{step}/").items():
            difference = (weight - tensors[f"weight/{step}/{parameter}"]).abs()
            assert difference[firm[parameter]].max() < 1e-5, parameter
    for metric, value in alone[1].items():
        assert scalars[metric] == pytest.approx(value, rel=1e-4, abs=1e-6), metric


@pytest.mark.parametrize("name", cases(*WITH_ADAPTERS))
def test_two_ranks_with_adapters_are_one_rank(name: str, one_rank: Ranks, tiny_model: Path, two_ranks: Path) -> None:
    sections = {"learner": {"lora": LORA}, "algorithm": {"kl_loss_coef": 0.1}}
    alone = record(make_config(tiny_model, **sections), one_rank, make_groups())
    tensors, scalars = load(two_ranks, name, 0)
    assert tensors.keys() == alone[0].keys() and scalars["2/kl/reference"] > 0
    for key, tensor in alone[0].items():
        if key.startswith("gradient"):
            assert ".lora_" in key
            torch.testing.assert_close(tensors[key], tensor, atol=1e-6, rtol=1e-3)
        else:
            assert (tensors[key] - tensor).abs().mean() < 1e-6, key
    for metric, value in alone[1].items():
        assert scalars[metric] == pytest.approx(value, rel=1e-3, abs=1e-6), metric


@pytest.mark.parametrize("name", cases(*FLOAT32, *BFLOAT16, *WITH_ADAPTERS, "epochs"))
def test_ranks_agree(name: str, two_ranks: Path) -> None:
    (first, metrics), (second, others) = (load(two_ranks, name, rank) for rank in (0, 1))
    assert metrics == others
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key


@pytest.mark.parametrize("name", cases("alone", *FLOAT32, *BFLOAT16))
def test_norm_clipping_and_adam(name: str, alone: Record, two_ranks: Path) -> None:
    tensors, scalars = alone if name == "alone" else load(two_ranks, name, 0)
    bfloat16 = name in BFLOAT16
    weights = {n: w.double() for n, w in part(tensors, "weight/0/").items()}
    first = {n: torch.zeros_like(w) for n, w in weights.items()}
    second = {n: torch.zeros_like(w) for n, w in weights.items()}
    for step, max_grad_norm in enumerate(MAX_GRAD_NORMS, start=1):
        gradients = {n: g.double() for n, g in part(tensors, f"gradient/{step}/").items()}
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        assert scalars[f"{step}/learner/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        scale = min(1.0, max_grad_norm / float(norm))
        assert (scale < 1) == (step == 1)
        for n, weight in weights.items():
            gradient = gradients[n] * scale
            first[n] = 0.9 * first[n] + 0.1 * gradient
            second[n] = 0.95 * second[n] + 0.05 * gradient.square()
            denominator = (second[n] / (1 - 0.95**step)).sqrt() + 1e-8
            weights[n] = weight * (1 - LR * 0.1) - LR * first[n] / (1 - 0.9**step) / denominator
            trained = tensors[f"weight/{step}/{n}"]
            tolerance: dict[str, Any] = {"atol": 1e-6, "rtol": 2.0**-8} if bfloat16 else {"atol": 2e-6, "rtol": 0.0}
            torch.testing.assert_close(trained.double(), weights[n], **tolerance)


@pytest.mark.parametrize("name", cases(*SKIPS))
def test_all_ranks_skip_an_update_that_is_not_finite_on_one(name: str, two_ranks: Path) -> None:
    first, second = (json.loads((two_ranks / f"errors-{rank}.json").read_text())["skips"][name] for rank in (0, 1))
    assert first == second and first["weights_kept"]
    of_updates = {name for name in first["skipped"] if not name.startswith("batch/")}
    assert of_updates == {"learner/tokens", "learner/skipped_updates", "learner/flops"}
    assert first["skipped"]["learner/skipped_updates"] == 1.0
    assert first["too_many"].startswith("RunError: step 3: 2 updates in a row are not finite")
    assert "the loss of ticket 12, trajectory 3 is not finite" in first["too_many"]
    assert all(row["learner/grad_norm"] > 0 and row["learner/skipped_updates"] == 0.0 for row in first["sound"])


def test_a_batch_that_is_too_stale_on_one_rank_stops_all(two_ranks: Path) -> None:
    reason = "ticket 10: a token of version 4 reached the learner at version 7, 3 steps later; replay.max_staleness = 2"
    for rank, prefix in ((0, "RunError: learner rank 1: "), (1, "InvariantError: ")):
        assert json.loads((two_ranks / f"errors-{rank}.json").read_text())["stale"] == prefix + reason


def test_a_rank_that_died_is_reported(two_ranks: Path) -> None:
    lost = json.loads((two_ranks / "errors-0.json").read_text())["lost"]
    assert lost.startswith("PeerTimeoutError: learner rank 0: another learner rank stopped or did not answer")


def test_ranks_that_do_not_come_up_are_named(free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))  # monkeypatch restores it after the test
    with (
        pytest.raises(PeerTimeoutError, match=r"learner ranks \[1, 2\] of 3 did not come up within 0.5 s"),
        process_group(endpoints(free_port()), 0, 3, start_timeout_s=0.5, timeout_s=5),
    ):
        pass
    with (
        pytest.raises(PeerTimeoutError, match=r"learner rank 1: no rendezvous within 0.5 s: nobody answered at ipc:"),
        process_group(endpoints(free_port()), 1, 2, start_timeout_s=0.5, timeout_s=5),
    ):
        pass
