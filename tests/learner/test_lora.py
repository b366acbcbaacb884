"""Adapters: what they compute, what is trained, sent and written, and what is refused. Two ranks are in
test_learner_ranks.py and test_saving.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from worlds import LORA, copy_weights, make_config, make_groups, make_trainer, pack_groups, train_steps

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError, ProtocolError, RunError
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.engine import STEP
from asyncrl.learner.model.policy import Reference
from asyncrl.learner.model.saving import BASE, SKIPPED, collect_state, restore_state, save_model
from asyncrl.learner.step import Trainer
from asyncrl.weights.layout import WeightManifest
from asyncrl.weights.model_tensors import MergedWeights, adapter_shapes, fingerprint_of, meta_model
from benchmarks.families import save_family


def trained(model: Path, ranks: Ranks, /, *, steps: int = 2, **sections: Any) -> Trainer:
    sections["learner"] = {"lora": LORA, "lr": 1e-2} | sections.get("learner", {})
    trainer = make_trainer(make_config(model, **sections), ranks)
    train_steps(trainer, range(1, steps + 1))
    return trainer


def test_only_adapters_are_trained(one_rank: Ranks, tiny_model: Path) -> None:
    before = copy_weights(make_trainer(make_config(tiny_model), one_rank).policy)
    policy = trained(tiny_model, one_rank).policy
    assert policy.adapters is not None
    base = dict(policy.adapters.frozen(policy.model.named_parameters()))
    assert base.keys() == before.keys() and all(torch.equal(base[name], before[name]) for name in base)
    whole = copy_weights(policy)
    changed = {name for name in whole if not torch.equal(whole[name], before[name])}
    assert changed == set(policy.factors()) and len(changed) == 14
    again = copy_weights(policy)
    assert all(torch.equal(whole[name], again[name]) for name in whole), "merging does not accumulate"
    keys = set(collect_state(policy)) - {STEP, SKIPPED, BASE}
    assert len(keys) == 3 * 2 * 14 and all(".lora_" in key for key in keys)


def test_adapters_alone_are_sent(one_rank: Ranks, tiny_model: Path) -> None:
    policy = trained(tiny_model, one_rank).policy
    assert policy.adapters is not None
    base = {name: weight.clone() for name, weight in policy.adapters.frozen(policy.model.named_parameters())}
    sent = {name: weight.clone() for name, weight in policy.sent_slices()}
    assert list(sent) == [name for name, *_ in policy.sent_shapes()] and len(sent) == 28
    known = adapter_shapes(meta_model(str(tiny_model), trust_remote_code=False), policy_config(tiny_model).learner.lora)
    assert {name: tuple(weight.shape) for name, weight in sent.items()} == known
    whole = copy_weights(policy)
    scale = policy_config(tiny_model).learner.lora.scale
    merged_weights = MergedWeights(base, sent.items(), scale, device=torch.device("cpu"))
    assert list(merged_weights) == list(whole)
    assert all(torch.equal(merged_weights[name], weight) for name, weight in whole.items())
    complete = sum(weight.nbytes for weight in whole.values())
    assert WeightManifest.of(policy.sent_shapes()).num_bytes < complete / 2, "a model of width 32"


def policy_config(model: Path) -> Config:
    return make_config(model, learner={"lora": LORA})


def test_adapters_belong_to_their_base(one_rank: Ranks, tiny_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    assert fingerprint_of(str(other)) == fingerprint_of(str(tiny_model))
    (file,) = other.glob("*.safetensors")
    weights = load_file(file)
    name = max(weights, key=lambda one: weights[one].nbytes)
    weights[name][-1] += 1
    save_file(weights, file, {"format": "pt"})
    assert fingerprint_of(str(other)) != fingerprint_of(str(tiny_model))
    half = trained(tiny_model, one_rank).policy
    save_file(collect_state(half), tmp_path / "rank-0.safetensors")
    with pytest.raises(RunError, match="its adapters belong to other weights"):
        restore_state(trained(other, one_rank, steps=0).policy, tmp_path)
    assert half.adapters is not None
    manifest = WeightManifest.from_json(WeightManifest.of(half.sent_shapes(), base=half.adapters.base).to_json())
    manifest.check_base(fingerprint_of(str(tiny_model)))
    for base in ("", fingerprint_of(str(other))):
        with pytest.raises(ProtocolError, match="must have the same files"):
            manifest.check_base(base)
    policy_without_adapters = make_trainer(make_config(tiny_model), one_rank).policy
    with pytest.raises(ProtocolError, match="adapters of the base none, but"):
        WeightManifest.of(policy_without_adapters.sent_shapes()).check_base(fingerprint_of(str(tiny_model)))


def test_the_reference_is_the_model_without_adapters(one_rank: Ranks, tiny_model: Path) -> None:
    trainer = trained(tiny_model, one_rank, algorithm={"kl_loss_coef": 0.1})
    policy, config = trainer.policy, trainer.config
    reference = Reference(config, one_rank)
    micro = pack_groups(config, make_groups(2)).micro_batches[0]
    alone = policy.base_logprobs(micro)
    torch.testing.assert_close(alone, reference.logprobs(micro), rtol=0, atol=0)
    assert (policy.logprobs(micro) - alone).abs().max() > 1e-2
    assert trainer._reference is None, "no second model was loaded"


def test_folders_of_model_and_adapter(one_rank: Ranks, tiny_model: Path, tmp_path: Path) -> None:
    policy = trained(tiny_model, one_rank).policy
    save_model(policy, tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    weights = copy_weights(policy)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    separate = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), str(tmp_path / "adapter"))
    tokens = torch.arange(1, 12).unsqueeze(0)
    logits: list[Tensor] = [one(tokens).logits for one in (model, separate)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    before = AutoModelForCausalLM.from_pretrained(tiny_model)(tokens).logits
    assert (logits[1] - before).abs().max() > 1e-2, "the adapter was loaded"


def test_layers_by_name(one_rank: Ranks, tiny_model: Path) -> None:
    policy = trained(tiny_model, one_rank, learner={"lora": {"rank": 2, "alpha": 3, "targets": ["q_proj"]}}).policy
    factors = policy.factors()
    assert list(factors) == [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    assert {one.scale for one in factors.values()} == {1.5} and {one.a.shape for one in factors.values()} == {(2, 32)}


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"learner": {"lora": LORA}, "weights": {"staging": "buckets"}}, "adapters are small"),
        ({"learner": {"lora": {"targets": ["q_proj"]}}}, "there are no adapters; set rank"),
        (
            {"learner": {"lora": LORA}, "algorithm": {"reference": "elsewhere", "kl_loss_coef": 0.1}},
            "algorithm.reference = 'elsewhere' with learner.lora.rank = 4",
        ),
    ],
)  # fmt: skip
def test_refused_settings(sections: dict[str, Any], error: str, tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=error):
        make_config(tiny_model, **sections)


@pytest.mark.parametrize(
    ("family", "targets", "error"),
    [
        ("qwen2", ["lm_head"], "lm_head is the output layer"),
        ("qwen2", ["q_proj", "w7"], "model.path has no layer 'w7'"),
        ("qwen2", ["w7"], "learner.lora.targets = "),
        ("gpt2", ["c_attn"], "is a Conv1D, but only linear layers"),
        ("mixtral", ["q_proj", "gate"], "is a MixtralTopKRouter, but only linear layers"),
    ],
)
def test_refused_layers(family: str, targets: list[str], error: str, one_rank: Ranks, tmp_path: Path) -> None:
    model = save_family(family, tmp_path)
    with pytest.raises(ConfigError, match=error):
        trained(model, one_rank, steps=0, learner={"lora": LORA | {"targets": targets}})
