"""Placement, memory and refusals of `launch.colocate`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import yaml
from test_memory import QWEN2_05B, QWEN2_7B, fitted, shape_of

from asyncrl.colocate import generator_locks
from asyncrl.config.config import Config
from asyncrl.config.load import load_config, parse_override
from asyncrl.errors import ConfigError
from asyncrl.launch import machine as gpus
from asyncrl.launch.machine import Host
from asyncrl.launch.memory import GIB, PIECE, PROCESS_BYTES, Models, choose_staging, needs_of_gpus
from asyncrl.launch.placement import check_transport, place_roles
from asyncrl.launch.supervisor import Progress
from tests.helpers.replay import small_config

IPC = {"weights__transport": "ipc"}
MIB = 81559
"""`memory.total` of an H100."""


@pytest.fixture(autouse=True)
def four_cores_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(gpus, "torch_is_cpu_build", lambda: False)
    monkeypatch.setattr(gpus, "_listed_gpus", lambda: None)


def on(**overrides: Any) -> Config:
    return small_config(**{"launch__colocate": "on", "replay__groups_per_step": 4} | overrides)


def show(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    listed = [gpus._Listed(str(index), f"GPU-{index}", MIB << 20) for index in range(count)]
    monkeypatch.setattr(gpus, "_listed_gpus", lambda: listed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def test_on_and_off_are_no_booleans() -> None:
    config = on()
    assert config.launch.colocate == "on" and yaml.safe_load(config.to_yaml())["launch"]["colocate"] == "on"
    key, value = parse_override("launch.colocate=on")
    values = {"model.path": "none", "data.train": "none.parquet", key: value}
    assert load_config(None, values).launch.colocated
    assert not load_config(None, values | {key: False}).launch.colocated


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"launch__learners": 2}, r"colocate = 'on' with launch.learners = 2: .* have 1; use launch.learners=1"),
        ({"generator__tensor_parallel": 2}, r"learners = 1: .*tensor_parallel = 2 have 2; use launch.learners=2"),
        ({"critic__ranks": 1}, r"critic.ranks = 1: .*use critic.ranks=0"),
        ({"weights__staging": "buckets"}, r"weights.staging = 'buckets': .*use weights.staging=whole or .*=ipc"),
        (IPC | {"weights__staging": "whole"}, r"ipc' with weights.staging = 'whole': .*use weights.staging=auto"),
        (IPC | {"launch__generators": 2, "launch__learners": 2}, r"ipc' with launch.generators = 2 and .*=auto"),
        (IPC | {"generator__tensor_parallel": 2, "launch__learners": 2}, r"launch.learners = 2: it is for one of each"),
        (IPC | {"learner__lora__rank": 4}, r"ipc' with learner.lora.rank = 4: .*use weights.transport=auto"),
        (IPC | {"learner__offload": "all", "learner__zero_stage": 3}, r"ipc' with learner.offload = 'all': .*=auto"),
    ],
)
def test_what_cannot_share_cards_is_refused(overrides: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        on(**overrides)


def test_ipc_is_for_roles_that_share_a_card() -> None:
    with pytest.raises(ConfigError, match=r"transport = 'ipc': .*use launch.colocate=on, or weights.transport=auto"):
        check_transport(small_config(**IPC), place_roles(small_config(**IPC)))
    config = on(**IPC)
    placement = place_roles(config)
    check_transport(config, placement)
    chosen, line = choose_staging(config, placement, reward_model=False)
    assert chosen.weights.staging == "buckets" and not line


def test_cores_are_divided_into_cards() -> None:
    placement = place_roles(on())
    assert placement.generators[0].cpus == placement.learners[0].cpus == (0, 1, 2, 3)
    assert placement.generators[0].threads == placement.learners[0].threads == 4
    placement = place_roles(on(launch__generators=2, launch__learners=2))
    for pair in zip(placement.generators, placement.learners, strict=True):
        assert pair[0].cpus == pair[1].cpus and pair[0].threads == 2
    assert [one.cpus for one in placement.learners] == [(0, 1), (2, 3)]
    placement = place_roles(on(launch__learners=2, generator__tensor_parallel=2))
    assert placement.generators[0].cpus == (0, 1, 2, 3) and placement.learners[1].cpus == (2, 3)
    joined = on(launch__generators=1)
    launch = joined.launch.model_copy(update={"generators": 2})
    placement = place_roles(joined.model_copy(update={"launch": launch}))
    assert placement.generators[1].cpus == (0, 1, 2, 3)


def test_a_generator_has_the_devices_of_its_ranks(tmp_path: Any) -> None:
    config = on(launch__generators=2, launch__learners=4, generator__tensor_parallel=2)
    assert len(generator_locks(config, 1, tmp_path)) == 2
    assert sorted(path.name for path in (tmp_path / "devices").iterdir()) == ["device-2", "device-3"]
    assert not generator_locks(config, 2, tmp_path), "one that joined"
    assert not generator_locks(small_config(), 0, tmp_path)


def test_gpus_are_shared_with_an_unproven_engine_only_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, 2)
    config = on(launch__generators=2, launch__learners=2)
    with pytest.raises(ConfigError, match=r"engine = 'vllm': .*not proven on a GPU.*launch.colocate=force"):
        place_roles(config)
    place_roles(on(launch__generators=2, launch__learners=2, generator__engine="transformers"))
    config = on(launch__generators=2, launch__learners=2, launch__colocate="force")
    placement = place_roles(config)
    assert [one.gpus for one in placement.generators] == [one.gpus for one in placement.learners] == [("0",), ("1",)]
    assert not placement.sends_between_gpus
    with pytest.raises(ConfigError, match="on 2 hosts"):
        place_roles(on(), hosts=[Host("a", (0, 1)), Host("b", (0, 1))])


def test_a_card_needs_the_larger_of_the_two(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models(shape_of(QWEN2_05B))
    settings = {"model__dtype": "bfloat16", "generator__max_new_tokens": 64, "learner__gradient_checkpointing": True}
    config = on(launch__colocate="force", **settings)
    placement = fitted(monkeypatch, config, 1, MIB, models)
    (card,) = needs_of_gpus(config, placement, models)
    needs = {need.name: need.num_bytes for need in card.needs}
    assert card.needed_bytes == max(needs.values()) + PROCESS_BYTES < sum(needs.values()) - GIB
    assert f"in turn {card.needed_bytes / GIB:.1f} GiB" in str(card)
    apart = fitted(monkeypatch, small_config(**settings), 1, MIB, models).generators[0].gpu_memory_utilization
    more = (placement.generators[0].gpu_memory_utilization or 0) - (apart or 0)
    assert more * card.memory_bytes == pytest.approx(needs["learner-0"] - PROCESS_BYTES), (
        "the learner's is the engine's"
    )
    # A card that either of them fits, and both together do not.
    mib = round((card.needed_bytes + GIB) / 0.9) >> 20
    fitted(monkeypatch, config, 1, mib, models)
    with pytest.raises(ConfigError, match="not to fit its GPUs"):
        fitted(monkeypatch, small_config(**settings), 1, mib, models)
    with pytest.raises(ConfigError, match=r"not to fit its GPUs(.|\n)*; in turn"):
        fitted(monkeypatch, config, 1, round(0.8 * card.needed_bytes) >> 20, models)


def test_a_card_needs_both_weights_where_they_are_handed_over_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models(shape_of(QWEN2_7B))
    settings = {
        "model__dtype": "bfloat16", "generator__max_new_tokens": 64, "learner__gradient_checkpointing": True,
        "learner__offload": "optimizer", "learner__zero_stage": 2, "launch__colocate": "force",
        "generator__kv_cache_bytes": 1 << 30, "learner__tokens_per_microbatch": 4096,
    }  # fmt: skip
    cards = {}
    for transport in ("auto", "ipc"):
        config = on(weights__transport=transport, **settings)
        placement = fitted(monkeypatch, config, 1, MIB, models)
        (cards[transport],) = needs_of_gpus(config, placement, models)
    card, weights = cards["ipc"], 2 * models.policy.parameters
    pieces = [need.parts.get(part, 0) for need in card.needs for part in (PIECE, "staged weights")]
    assert card.hand_over_bytes == 2 * weights + 2 * PROCESS_BYTES + sum(pieces) and sum(pieces) < GIB
    assert cards["auto"].hand_over_bytes == 0
    assert card.needed_bytes == card.hand_over_bytes > cards["auto"].needed_bytes
    mib = round((cards["auto"].needed_bytes + GIB / 2) / 0.9) >> 20
    with pytest.raises(ConfigError, match=r"not to fit its GPUs(.|\n)*with weights.transport=auto it would fit"):
        fitted(monkeypatch, on(**IPC, **settings), 1, mib, models)


def test_tokens_are_progress_while_the_learner_waits_for_its_card() -> None:
    def reason(config: Config) -> str:
        progress = Progress(config, 0.0)
        status: dict[str, Any] = {
            "taken": True, "finished": 0, "leased": 3, "step": 1, "catching_up": None,
            "eval": {"prompts_done": 0, "running": []}, "refunded": {},
        }  # fmt: skip
        found = ""
        for now_s in range(0, 3000, 300):
            status["generators"] = {"0": {"tokens": now_s}}
            found = found or progress.check(status, learners_started_s=0.0, missing=[], now_s=float(now_s))
        return found

    assert reason(on()) == "" and "no optimizer step ended" in reason(small_config())
