"""What is saved of a model: the bits that the library writes, and a state from which training continues bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from worlds import CRITIC, STATE_RUNS, copy_weights, make_config, make_trainer, spawn, train_steps

from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.critic import Critic
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model import saving
from asyncrl.learner.model.engine import STEP
from asyncrl.learner.model.loading import load_policy_model, read_other_files
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.model.saving import BASE, SKIPPED, collect_state, restore_state, save_model
from asyncrl.util.files import tensor_files
from tests.helpers.selection import selected_names, slow_except

GENERATION: list[dict[str, Any]] = [
    {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 1, "pad_token_id": 0},
    {"do_sample": True, "temperature": 0.6, "eos_token_id": [1, 2], "of_a_later_version": {"a": None}},
]
"""Contents of generation_config.json. The library reads all of them and writes only the last one."""


@pytest.mark.parametrize("generation", [*GENERATION, None])
def test_generation_settings_are_saved_as_they_were(
    generation: dict[str, Any] | None, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    if generation is None:
        (folder / "generation_config.json").unlink()
        settings = json.loads((folder / "config.json").read_text()) | {"temperature": 0.6, "eos_token_id": [1, 2]}
        (folder / "config.json").write_text(json.dumps(settings))
    else:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    files = read_other_files(load_policy_model(make_config(folder), str(folder)), [str(folder)])
    assert ("generation_config.json" in files) == (generation is not None)
    for name in ("tokenizer.json", "tokenizer_config.json", *(["generation_config.json"] if generation else [])):
        assert files[name] == (folder / name).read_bytes()
    if generation is None:
        assert json.loads(files["config.json"])["eos_token_id"] == [1, 2], "the ends of completions stay"


def add_unusual_files(folder: Path) -> None:
    """A tokenizer with its own code, and files of other programs."""
    for path in folder.glob("tokenizer*"):
        path.unlink()
    for name in (
        "tokenizer_config.json", "tokenization_letters.py", "letters.vocab", "pytorch_model.bin",
        "model.safetensors.index.json.old", "adapter_model.bin", ".hidden", "x.gguf",
    ):  # fmt: skip
        (folder / name).write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION[0]))
    for name in ("additional_chat_templates/tool_use.jinja", "checkpoint-5/config.json"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("{{ messages }}")


def test_models_of_policy_and_critic_have_all_files_but_weights(
    one_rank: Ranks, tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "source")
    add_unusual_files(tmp_path / "source")
    config = make_config(tmp_path / "source", **CRITIC)
    policy, critic = Policy(config, one_rank), Critic(config, one_rank)
    shutil.rmtree(tmp_path / "source")  # all of them were read before the training
    save_model(policy, tmp_path / "model")
    critic.save(tmp_path / "critic")
    for folder in (tmp_path / "model", tmp_path / "critic"):
        found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert found == {
            "config.json", "generation_config.json", "model.safetensors", "tokenization_letters.py", "letters.vocab",
            "tokenizer_config.json", "model.safetensors.index.json.old", "additional_chat_templates/tool_use.jinja",
        }  # fmt: skip
        assert json.loads((folder / "generation_config.json").read_text()) == GENERATION[0]
    kinds = [json.loads((tmp_path / name / "config.json").read_text())["architectures"] for name in ("model", "critic")]
    assert kinds == [["Qwen2ForCausalLM"], ["Qwen2ForTokenClassification"]]


def test_a_model_that_cannot_be_saved_is_refused_before_it_is_trained(
    one_rank: Ranks, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise ValueError("generation parameters are set in the model config")

    monkeypatch.setattr("transformers.Qwen2Config.save_pretrained", refuse)
    with pytest.raises(ConfigError, match="could not be saved after training: ValueError: generation parameters"):
        Policy(make_config(tiny_model), one_rank)


def test_a_large_model_is_several_files(
    one_rank: Ranks, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = partial(saving.split_torch_state_dict_into_shards, max_shard_size=20_000)
    monkeypatch.setattr(saving, "split_torch_state_dict_into_shards", split)
    save_model(Policy(make_config(tiny_model), one_rank), tmp_path / "model")
    saved, source = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path / "model", tiny_model)
    )
    assert len(set(tensor_files(tmp_path / "model").values())) > 2 and saved.keys() == source.keys()
    assert all(torch.equal(tensor, source[name]) for name, tensor in saved.items())


@pytest.mark.parametrize("former", ["", "model", "model.former"])
def test_a_model_that_cannot_be_written_is_not_there(
    former: str, one_rank: Ranks, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former one stays, also where a killed process left it while it replaced the folder."""
    policy = Policy(make_config(tiny_model), one_rank)
    if former:
        save_model(policy, tmp_path / "model")
        (tmp_path / "model").rename(tmp_path / former)
    monkeypatch.setattr(saving, "save_file", Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(RunError, match=r"the model cannot be written to .*model: No space left on device; free disk"):
        save_model(policy, tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} == {"model.partial", former} - {""}


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
    spawn("state_ranks.py", tiny_model, out, free_port(), ranks=2, timeout_s=220, names=names)
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
    advice = "resume with the model.path, critic.path and learner.lora that the run began with"
    assert error({k: t for k, t in state.items() if k != key}) == (
        f"{tmp_path}: lacks {key}, unlike the model of this run; {advice}"
    )
    assert "holds weight/score.weight, unlike" in error(state | {"weight/score.weight": torch.zeros(1)})
    assert error(state | {"weight/model.norm.weight": torch.zeros(31)}) == (
        f"{tmp_path}: model.norm.weight has shape [31], but [32] in the model of this run; {advice}"
    )


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
