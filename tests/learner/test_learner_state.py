"""Training that continues from a saved state is bit-identical to uninterrupted training, at every ZeRO stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from worlds import STATE_RUNS, copy_weights, make_config, make_trainer, spawn, train_steps

from asyncrl.errors import RunError
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.engine import STEP
from asyncrl.learner.model.saving import (
    BASE,
    SKIPPED,
    collect_state,
    random_state,
    restore_random_state,
    restore_state,
    seed_random_state,
)
from tests.helpers.selection import selected_names, slow_except

QUICK = ("zero3", "bfloat16-zero1", "lora-zero3")
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def two(
    tiny_model: Path,
    free_port: Callable[[], int],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Path:
    """Folder with the results of `state_ranks.py`."""
    out = tmp_path_factory.mktemp("state_ranks")
    names = selected_names(request, "two")
    codes = spawn("state_ranks.py", tiny_model, out, free_port(), ranks=2, timeout_s=220, names=names)
    assert codes == [0, 0], (out / "0.log").read_text()[-2000:] + (out / "1.log").read_text()[-2000:]
    return out


def same(first: State, second: State) -> None:
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert tensor.dtype == second[key].dtype and tensor.numpy().tobytes() == second[key].numpy().tobytes(), key


def part(tensors: State, prefix: str) -> State:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


@pytest.mark.parametrize("name", slow_except(QUICK, STATE_RUNS))
def test_two_ranks_continue_from_their_state(name: str, two: Path) -> None:
    names: list[set[str]] = []
    for rank in (0, 1):
        tensors = load_file(two / name / f"{rank}.safetensors")
        same(part(tensors, "half/"), part(tensors, "restored/"))
        same(part(tensors, "4/"), part(tensors, "again/"))
        assert int(tensors["half/step"]) == 2 and int(tensors["4/step"]) == 4
        names.append({key for key in part(tensors, "4/") if key not in (STEP, SKIPPED, BASE)})
        assert all(tensors[f"4/{key}"].dtype is torch.float32 for key in names[-1])
        moved = [key for key in names[-1] if not torch.equal(tensors[f"half/{key}"], tensors[f"4/{key}"])]
        assert len(moved) == len(names[-1])
    assert not names[0] & names[1] and abs(len(names[0]) - len(names[1])) <= 6


@pytest.mark.parametrize("name", slow_except(QUICK[:2], ("zero2", *QUICK[:2])))
def test_one_rank_loads_the_state_of_two(name: str, two: Path, one_rank: Ranks, tiny_model: Path) -> None:
    sections = STATE_RUNS[name] | {"learner": {"zero_stage": 0}}
    trainer = make_trainer(make_config(tiny_model, **sections), one_rank)
    restore_state(trainer.policy, two / name / "2")
    wanted = load_file(two / name / "2" / "rank-0.safetensors") | load_file(two / name / "2" / "rank-1.safetensors")
    same(collect_state(trainer.policy), wanted)
    for parameter, weight in copy_weights(trainer.policy).items():
        assert torch.equal(weight, wanted[f"weight/{parameter}"].to(weight.dtype))
    train_steps(trainer, (3, 4))
    if "bfloat16" not in name:
        ends = [load_file(two / name / f"{rank}.safetensors") for rank in (0, 1)]
        state = part(ends[0], "4/") | part(ends[1], "4/")
        for parameter, weight in copy_weights(trainer.policy).items():
            difference = (weight - state[f"weight/{parameter}"]).abs()
            # Adam moves a weight by up to lr if its gradient consists of rounding errors only.
            assert difference.median() < 1e-6 and difference.max() < 4e-3, parameter


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_continues_from_its_state(dtype: str, one_rank: Ranks, tiny_model: Path, tmp_path: Path) -> None:
    config = make_config(tiny_model, model={"dtype": dtype}, steps=4)
    trainers = [make_trainer(config, one_rank) for _ in range(3)]
    train_steps(trainers[0], (1, 2, 3, 4))
    train_steps(trainers[1], (1, 2))
    save_file(collect_state(trainers[1].policy), tmp_path / "rank-0.safetensors")
    restore_state(trainers[2].policy, tmp_path)
    train_steps(trainers[2], (3, 4))
    same(collect_state(trainers[0].policy), collect_state(trainers[2].policy))
    same(
        {name: weight.float() for name, weight in copy_weights(trainers[0].policy).items()},
        {name: weight.float() for name, weight in copy_weights(trainers[2].policy).items()},
    )


def test_a_model_without_updates_has_a_state(one_rank: Ranks, tiny_model: Path, tmp_path: Path) -> None:
    config = make_config(tiny_model)
    first, second = (make_trainer(config, one_rank) for _ in range(2))
    save_file(collect_state(first.policy), tmp_path / "rank-0.safetensors")
    restore_state(second.policy, tmp_path)
    for trainer in (first, second):
        train_steps(trainer, (1,))
    same(copy_weights(first.policy), copy_weights(second.policy))


def test_the_state_of_another_model_is_refused(one_rank: Ranks, tiny_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(make_config(tiny_model), one_rank)
    state = collect_state(trainer.policy)
    path = tmp_path / "rank-0.safetensors"

    def error(changed: State) -> str:
        save_file(changed, path)
        with pytest.raises(RunError) as raised:
            restore_state(trainer.policy, tmp_path)
        return str(raised.value)

    key = "exp_avg/model.norm.weight"
    advice = "resume with the model.path, critic.path, learner.lora and learner.optimizer that the run began with"
    assert error({k: t for k, t in state.items() if k != key}) == (
        f"{tmp_path}: lacks {key}, unlike the model of this run; {advice}"
    )
    assert "holds weight/score.weight, unlike" in error(state | {"weight/score.weight": torch.zeros(1)})
    assert error(state | {"weight/model.norm.weight": torch.zeros(31)}) == (
        f"{tmp_path}: model.norm.weight has shape [31], but [32] in the model of this run; {advice}"
    )


def test_random_numbers_continue(tmp_path: Path) -> None:
    states: dict[str, Any] = random_state()
    wanted = torch.rand(5)
    restore_random_state(states)
    assert torch.equal(torch.rand(5), wanted)


def test_a_rank_that_cannot_write_ends_all_and_leaves_nothing(two: Path) -> None:
    texts = [json.loads((two / f"failed-{rank}.json").read_text()) for rank in (0, 1)]
    assert texts[0] == f"learner rank 1: {texts[1]}"
    assert texts[1].startswith(f"the checkpoint {two}/checkpoints/step-000050.partial cannot be written: ")
    assert "File too large" in texts[1] and texts[1].endswith("then continue with `asyncrl launch --resume`")
    assert list((two / "checkpoints").iterdir()) == []


def test_a_rank_that_hangs_is_found_by_the_deadline_of_the_others(two: Path) -> None:
    hung = json.loads((two / "hung.json").read_text())
    assert hung["timeout_s"] == 30.0, "the deadline passed to `process_group`"
    assert hung["error"].startswith("learner rank 0: another learner rank stopped or did not answer: ")
    assert "imed out" in hung["error"] and 1.4 < hung["waited_s"] < 15


def test_a_rank_without_a_random_state_gets_one_of_its_own_that_is_always_the_same() -> None:
    before = random_state()
    try:
        draws: list[list[float]] = []
        for rank in (2, 3, 2):
            seed_random_state(7, 50, rank)
            draws.append(torch.rand(4).tolist())
        assert draws[0] == draws[2] != draws[1]
    finally:
        restore_random_state(before)
