"""The computed GPU memory of a run. Every GPU preset fits its GPUs. These tests measure no GPU."""

from __future__ import annotations

import atexit
import hashlib
import json
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.config import Config
from asyncrl.config.load import load_config, parse_override
from asyncrl.errors import ConfigError
from asyncrl.launch import machine as gpus
from asyncrl.launch.gpu_layout import CARDS, parse_cards
from asyncrl.launch.memory import (
    GIB,
    Models,
    Shape,
    choose_staging,
    engine_parts,
    find_changes,
    fit_memory,
    item_bytes,
    learner_parts,
    longest_tokens,
    needs_of_gpus,
    staging_parts,
    trained_parts,
)
from asyncrl.launch.placement import Placement, place_roles

QWEN2_05B = {
    "model_type": "qwen2",
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
QWEN2_15B = {
    "model_type": "qwen2",
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
"""The sizes in `config.json` of the presets' models."""

FOLDERS = Path(tempfile.mkdtemp())
"""Folders of models with nothing but a `config.json`."""
atexit.register(shutil.rmtree, FOLDERS)

PRESETS = {
    "gsm8k_0.5b": (QWEN2_05B, 494_032_768),
    "math_1.5b": (QWEN2_15B, 1_543_714_304),
    "math_7b": (QWEN2_7B, 7_615_616_512),
    "rlhf_8b": (LLAMA_8B, 8_030_261_248),
}
"""Shape and parameters of the presets with other models than the demo's."""
MIB_80GB, MIB_141GB = 81559, 143771
"""`memory.total` of an H100 and an H200."""
DEMO: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 23,
}


@pytest.fixture(autouse=True)
def torch_for_gpus_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "torch_is_cpu_build", lambda: False)


def show(monkeypatch: pytest.MonkeyPatch, count: int, mib: int) -> None:
    listed = [gpus._Listed(str(index), f"GPU-{index}", mib << 20) for index in range(count)]
    monkeypatch.setattr(gpus, "_listed_gpus", lambda: listed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def shape_of(settings: dict[str, Any]) -> Shape:
    """Returns the shape of a model whose folder has nothing but a `config.json`."""
    folder = FOLDERS / hashlib.sha256(text := json.dumps(settings).encode()).hexdigest()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(text)
    shape = Shape.read(str(folder))
    assert shape is not None
    return shape


def models_of(config: Config, settings: dict[str, Any]) -> Models:
    shape = shape_of(settings)
    reference = shape if config.algorithm.kl_reward_coef or config.algorithm.kl_loss_coef else None
    critic = shape if config.algorithm.advantage == "gae" else None
    return Models(shape, reference, critic, shape if config.rewards == "reward_model" else None)


def fitted(monkeypatch: pytest.MonkeyPatch, config: Config, count: int, mib: int, models: Models) -> Placement:
    show(monkeypatch, count, mib)
    reward_model = models.reward_model is not None
    monkeypatch.setattr(Models, "read", lambda *_, **__: models)
    return fit_memory(config, place_roles(config, reward_model=reward_model), reward_model=reward_model)


CONFIGS = Path(__file__).parents[2] / "configs"


def stated_cards(name: str) -> str:
    """Returns the cards in the comment at the top of a preset; two H100 for those that also run on a CPU."""
    comment = [line for line in (CONFIGS / f"{name}.yaml").read_text().splitlines() if line.startswith("#")]
    found = re.findall(r"\b\d+x[A-Z0-9]+-\d+\b", " ".join(comment))
    assert len(found) == (name in PRESETS), "a preset for GPUs states its cards, and only such a preset"
    return found[0] if found else "2xH100-80"


@pytest.mark.parametrize("card", ["as stated", "H200-141"])
@pytest.mark.parametrize("name", [path.stem for path in sorted(CONFIGS.glob("*.yaml"))])
def test_every_preset_fits_its_cards_by_arithmetic(monkeypatch: pytest.MonkeyPatch, name: str, card: str) -> None:
    config = load_config(name)
    count, _, gpu = parse_cards(stated_cards(name))
    gpu = gpu if card == "as stated" else CARDS[card]
    settings, parameters = PRESETS.get(name, (DEMO, 1_192_960))
    models = models_of(config, settings)
    assert models.policy.parameters == parameters
    placement = fitted(monkeypatch, config, count, round(gpu.memory_bytes) >> 20, models)
    cards = needs_of_gpus(config, placement, models)
    print("\n".join(map(str, cards)))
    assert len(cards) == count, "a GPU of the preset is not used"
    cache_bytes = [
        _cache_bytes(config, resources.gpu_memory_utilization, round(gpu.memory_bytes), models)
        for resources in placement.generators
    ]
    group_bytes = config.generator.group_size * longest_tokens(config) * token_bytes(config, models)
    assert min(cache_bytes) > group_bytes, "an engine has not enough memory for the keys and values of a group"


def test_the_gpus_of_a_generator_divide_weights_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(parallel: int) -> list[int]:
        config = load_config(None, SETTINGS | {"generator.tensor_parallel": parallel, "launch.learners": 2})
        models = models_of(config, QWEN2_7B)
        placement = fitted(monkeypatch, config, 2 + parallel, MIB_141GB, models)
        assert placement.generators[0].gpus == tuple(str(2 + index) for index in range(parallel))
        fraction = placement.generators[0].gpu_memory_utilization
        assert fraction is not None and 0.5 < fraction < 0.9
        return [card.needs[0].num_bytes for card in needs_of_gpus(config, placement, models)[2:]]

    (whole,), (first, second) = needs(1), needs(2)
    half = 2 * 7_615_616_512 // 2
    two_buckets = 2 * 2 * 18944 * 3584
    assert half < whole - 2 * half - (first - two_buckets) < 1.1 * half, "several GPUs stage versions in host memory"
    assert second < first, "the first one has buckets"


def _cache_bytes(config: Config, fraction: float | None, total_bytes: int, models: Models) -> float:
    """Returns the memory that vLLM has for keys and values."""
    parts = engine_parts(config, models.policy)
    cache = next(num_bytes for name, num_bytes in parts.items() if "key" in name)
    return (fraction or 0) * total_bytes - sum(parts.values()) + cache


def token_bytes(config: Config, models: Models) -> int:
    return 2 * models.policy.layers * models.policy.key_value * item_bytes(config.model.dtype)


SEVEN = shape_of(QWEN2_7B)
SETTINGS: dict[str, Any] = {
    "model.path": "m", "data.train": "d", "model.dtype": "bfloat16", "learner.zero_stage": 3, "launch.learners": 2,
    "learner.gradient_checkpointing": True, "generator.engine_options": {"max_model_len": 4096},
    "generator.max_new_tokens": 3072,
}  # fmt: skip


def test_an_engine_without_graphs_has_its_own_step_and_no_graphs() -> None:
    vllm, eager = (
        engine_parts(load_config(None, SETTINGS | {"generator.engine": engine}), SEVEN)
        for engine in ("vllm", "transformers")
    )
    assert "a step of 16384 tokens" in vllm and "a step of 8192 tokens" in eager
    assert vllm["CUDA graphs"] and not eager["CUDA graphs"]
    assert sum(eager.values()) < sum(vllm.values())


def test_states_are_divided_as_zero_does() -> None:
    def sums(dtype: str, stage: int) -> dict[str, float]:
        config = load_config(None, SETTINGS | {"model.dtype": dtype, "learner.zero_stage": stage})
        return {name: round(num / SEVEN.parameters, 2) for name, num in trained_parts(config, SEVEN, 4).items()}

    assert sums("bfloat16", 0) == sums("bfloat16", 1)
    keys = ("weights", "float32 copy of the weights", "optimizer states", "gradients")
    told = {(dtype, stage): tuple(sums(dtype, stage)[key] for key in keys)
            for dtype in ("float32", "bfloat16") for stage in (1, 2, 3)}  # fmt: skip
    assert told == {
        ("float32", 1): (4, 1, 2, 4), ("float32", 2): (4, 1, 2, 1), ("float32", 3): (1, 1, 2, 1),
        ("bfloat16", 1): (2, 1, 2, 4), ("bfloat16", 2): (2, 1, 2, 1), ("bfloat16", 3): (0.5, 1, 2, 1),
    }  # fmt: skip
    assert tuple(sums("float32", 0)[key] for key in keys) == (4, 0, 8, 4)


def test_the_first_exchange_of_gradients_takes_room_for_all_of_a_rank() -> None:
    """DeepSpeed 0.19.8, stages 1 and 2: `grads_in_partition`, or with stage 1 in bfloat16 its compact buffer."""
    from asyncrl.launch.memory import _exchange_bytes
    from asyncrl.learner.model.memory_trace import Trace

    trace, parameters = Trace(forward_bytes=1000, peak_bytes=4000, layers_bytes=1500), 200_000_000

    def added(dtype: str, stage: int, ranks: int) -> int:
        settings = {"model.path": "m", "data.train": "d", "model.dtype": dtype, "learner.zero_stage": stage}
        return _exchange_bytes(load_config(None, settings), trace, parameters, ranks, on_gpu=True)

    buckets, left = 2 * 50_000_000, 1000 * 3 // 4 + 500 - 4000
    for dtype, stage in (("float32", 1), ("float32", 2), ("bfloat16", 1)):
        for ranks in (1, 4):
            assert added(dtype, stage, ranks) == 4 * parameters // ranks + 4 * buckets + left
    assert added("bfloat16", 2, 1) == 4 * 50_000_000 + 2 * buckets + left, (
        "buckets in bfloat16, a copy of one in float32"
    )


def test_a_run_that_cannot_fit_is_refused_with_the_sum_and_the_keys_that_help(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SETTINGS | {
        "learner.gradient_checkpointing": False, "launch.learners": 4, "launch.generators": 1,
        "generator.max_new_tokens": 7168, "generator.engine_options": {"max_model_len": 8192},
    }  # fmt: skip
    config = load_config(None, settings)
    with pytest.raises(ConfigError) as caught:
        fitted(monkeypatch, config, 5, MIB_80GB, Models(SEVEN))
    lines = str(caught.value).splitlines()
    assert lines[0] == "this run is estimated not to fit its GPUs:"
    assert lines[1].startswith("  GPU 0 (79.6 GiB, of which 75.7 may be used): learner-0 93.")
    assert "activations of 8192 tokens 48." in lines[1] and "weights to send 3.5" in lines[1]
    assert lines[-1] == "with learner.gradient_checkpointing=true it would fit"
    config = load_config(None, settings | {"learner.gradient_checkpointing": True})
    assert fitted(monkeypatch, config, 5, MIB_80GB, Models(SEVEN)).generators[0].gpu_memory_utilization
    config = load_config(None, SETTINGS | {"launch.learners": 1, "learner.zero_stage": 0})
    with pytest.raises(ConfigError, match=r"\nwith learner.zero_stage=1 learner.offload=optimizer it would fit"):
        fitted(monkeypatch, config, 2, MIB_141GB, Models(SEVEN))
    with pytest.raises(ConfigError, match="no setting of these keys is enough: use more ranks"):
        fitted(monkeypatch, config, 2, 24564, Models(SEVEN))
    config = load_config(None, settings | {"learner.zero_stage": 2, "learner.tokens_per_microbatch": 65536})
    show(monkeypatch, 5, MIB_80GB)
    found = find_changes(config, place_roles(config), Models(SEVEN))
    assert found == ["learner.tokens_per_microbatch=32768", "learner.gradient_checkpointing=true"]


def test_a_step_of_the_engine_is_counted_as_long_as_vllm_makes_it() -> None:
    def step(**options: object) -> list[str]:
        config = load_config(None, SETTINGS | {"generator.engine_options": options})
        return [name for name in engine_parts(config, SEVEN) if name.startswith("a step of")]

    assert step() == ["a step of 16384 tokens"]
    assert step(max_num_batched_tokens=2048) == ["a step of 2048 tokens"]


def test_a_window_that_an_engine_does_not_fit_with_is_bounded_by_the_longest_trajectory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = SETTINGS | {
        "launch.learners": 4, "weights.transport": "gloo", "generator.gpu_memory_utilization": 0.26,
        "data.max_prompt_tokens": 512, "generator.engine_options": {"max_num_batched_tokens": 2048},
    }  # fmt: skip
    config = load_config(None, settings)
    show(monkeypatch, 5, MIB_80GB)
    changes = find_changes(config, place_roles(config), Models(SEVEN))
    assert changes == ["generator.engine_options.max_model_len=3584"]
    changed = load_config(None, settings | dict(map(parse_override, changes)))
    assert changed.generator.engine_options == {"max_num_batched_tokens": 2048, "max_model_len": 3584}
    assert fitted(monkeypatch, changed, 5, MIB_80GB, Models(SEVEN)).generators[0].gpu_memory_utilization


def test_an_engine_gets_what_staging_and_the_other_roles_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    total = MIB_80GB << 20
    alone = load_config(None, SETTINGS | {"launch.learners": 4, "launch.generators": 1})
    (resources,) = fitted(monkeypatch, alone, 5, MIB_80GB, Models(SEVEN)).generators
    staged = 2 * SEVEN.parameters + GIB
    assert (resources.gpu_memory_utilization or 0) * total == pytest.approx(0.9 * total - staged)
    assert resources.environment()["ASYNCRL_GPU_MEMORY_FRACTION"] == f"{resources.gpu_memory_utilization:.4f}"

    # Two generators on one GPU have half of it each; with gloo they stage no weights there.
    two = load_config(None, SETTINGS | {"launch.learners": 4, "launch.generators": 2})
    placement = fitted(monkeypatch, two, 5, MIB_80GB, Models(SEVEN))
    fractions = [resources.gpu_memory_utilization or 0 for resources in placement.generators]
    assert fractions[0] == fractions[1]
    assert fractions[0] * total == pytest.approx(0.45 * total - GIB - 2 * SEVEN.vocabulary * SEVEN.hidden)

    # On a learner's GPU the engine gets the remaining memory; with a bounded cache, no more than it needs.
    small = shape_of(DEMO | {"max_position_embeddings": 32})
    one = load_config(None, {"model.path": "m", "data.train": "d", "generator.kv_cache_bytes": 64 << 20})
    (resources,) = fitted(monkeypatch, one, 1, MIB_80GB, Models(small)).generators
    needed = (resources.gpu_memory_utilization or 0) * total
    assert needed == pytest.approx(sum(engine_parts(one, small).values()))
    assert 2 * GIB < needed < 4 * GIB
    free = load_config(None, {"model.path": "m", "data.train": "d"})
    placement = fitted(monkeypatch, free, 1, MIB_80GB, Models(small))
    (learner,) = [
        need for card in needs_of_gpus(free, placement, Models(small)) for need in card.needs if need.name[0] == "l"
    ]
    left = 0.9 * total - learner.num_bytes - GIB - 4 * small.vocabulary * small.hidden
    assert (placement.generators[0].gpu_memory_utilization or 0) * total == pytest.approx(left)


def test_auto_stages_whole_versions_where_they_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def chosen(models: Models, count: int, **changes: object) -> tuple[str, str]:
        settings = (
            SETTINGS | {"launch.learners": 4} | {name.replace("__", "."): value for name, value in changes.items()}
        )
        config = load_config(None, settings)
        show(monkeypatch, count, MIB_80GB)
        monkeypatch.setattr(Models, "read", lambda *_, **__: models)
        found, line = choose_staging(config, place_roles(config), reward_model=False)
        return found.weights.staging, line

    seven = Models(SEVEN)
    name, line = chosen(seven, 5)
    assert (name, line) == ("whole", "weights    staging whole: 14.2 GiB on the first GPU of each generator")
    tight: dict[str, object] = {"generator__gpu_memory_utilization": 0.4}
    name, line = chosen(seven, 5, **tight)
    assert (name, line) == ("buckets", "weights    staging buckets: 0.3 GiB on the first GPU of each generator")
    experts = Models(replace(SEVEN, active=SEVEN.parameters // 2))
    assert chosen(experts, 5, **tight)[0] == "host", "vLLM cannot load their buckets"
    assert chosen(experts, 5, **tight, generator__engine="transformers")[0] == "buckets"
    assert chosen(seven, 5, **tight, weights__transport="gloo")[0] == "host"
    (tmp_path / "pipes.py").write_text(
        "from asyncrl.weights.transports import Link, Transport\nPIPES = Transport(Link, what='Through pipes.')\n"
    )
    custom = f"{tmp_path / 'pipes.py'}:PIPES"
    assert chosen(seven, 5, **tight, weights__transport=custom)[0] == "host", "its buckets are in host memory"
    assert chosen(seven, 0) == ("whole", "")
    assert chosen(seven, 5, **tight, weights__staging="whole") == ("whole", "")


def test_where_memory_is_not_known_engines_on_one_gpu_divide_the_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_listed_gpus", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    config = load_config(None, SETTINGS | {"launch.learners": 1, "launch.generators": 3})
    placement = fit_memory(config, place_roles(config), reward_model=False)
    assert [resources.gpu_memory_utilization for resources in placement.generators] == [0.45, 0.9, 0.45]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    placement = place_roles(config)
    assert fit_memory(config, placement, reward_model=False) is placement


def test_shapes_are_read_from_the_config_of_other_families() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 11, "n_positions": 32}
    shape = shape_of(gpt2)
    assert (shape.layers, shape.hidden, shape.intermediate, shape.query, shape.vocabulary) == (2, 8, 32, 8, 11)
    experts = LLAMA_8B | {
        "model_type": "mixtral", "hidden_size": 128, "intermediate_size": 100, "num_hidden_layers": 1,
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64,
    }  # fmt: skip
    shape = shape_of(experts)
    assert (shape.intermediate, shape.query, shape.key_value) == (200, 2048, 512)
    assert shape.parameters - shape.active == 2 * 3 * 128 * 100, "two of four experts"
    assert Shape.of({"vocab_size": 3}, "", {}, 0) is None


@pytest.mark.parametrize(("engine", "room"), [("transformers", 1), ("vllm", 1 + 16 / 12)])
def test_adapters_need_memory_in_place_of_weights_to_send(engine: str, room: float) -> None:
    small, settings = (
        shape_of(DEMO | {"num_key_value_heads": 4}),
        SETTINGS | {"generator.engine": engine, "launch.learners": 4},
    )
    plain = load_config(None, settings)
    adapter, merged = (load_config(None, settings | {"learner.lora": {"rank": 12, "load": load}})
                       for load in ("adapter", "merged"))  # fmt: skip
    shape = Shape.read(small.folder, lora=adapter.learner.lora)
    assert shape is not None and 0 < shape.adapters < shape.parameters / 2
    sent = [
        learner_parts(config, one, reference=None, critic=None, sends=True)["weights to send"]
        for config, one in ((plain, small), (adapter, shape), (merged, shape))
    ]
    assert sent == [2 * small.parameters // 4, 2 * -(-shape.adapters // 4), 2 * -(-shape.adapters // 4)]
    assert engine_parts(adapter, shape)["adapter"] == pytest.approx(2 * room * shape.adapters, abs=2)
    assert not engine_parts(merged, shape)["adapter"] and not engine_parts(plain, small)["adapter"]
    one = 2 * small.vocabulary * small.hidden
    for on_gpu, whole in ((True, 2 * small.parameters), (False, one)):
        assert staging_parts(plain, small, on_gpu=on_gpu)["staged weights"] == whole
        assert staging_parts(adapter, shape, on_gpu=on_gpu)["staged weights"] == 2 * shape.adapters
        assert staging_parts(merged, shape, on_gpu=on_gpu)["staged weights"] == 2 * shape.adapters + one
