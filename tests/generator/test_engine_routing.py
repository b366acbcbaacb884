"""The experts that vLLM's routers choose: against the model's own routers, and replayed by the learner."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from generator_model import (
    async_scheduling,
    check_experts,
    close_all,
    run_all,
    small_config,
    swap_in_flight,
    versions_of_experts,
    weights_of,
)
from transformers import AutoModelForCausalLM

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError, InvariantError
from asyncrl.generator.engine import Completion
from asyncrl.generator.vllm_backend.engine import VllmEngine
from asyncrl.generator.vllm_backend.scheduling import RoutingRecords
from asyncrl.generator.vllm_backend.setup import _record_routing, explained
from asyncrl.util.model_files import Routers
from benchmarks.families import save_family

BLOCK_TOKENS = 32
PROMPTS = {
    f"{size} {member}": [3 + (7 * size + 5 * place) % 60 for place in range(size)]
    for size in (4, 33, 40, 70)
    for member in "ab"
}
"""Two completions of each prompt; the longer prompts fill one block of the cache, or two."""
SHORT = {key: prompt for key, prompt in PROMPTS.items() if len(prompt) < 40} | {
    "begin": PROMPTS["70 a"][: 2 * BLOCK_TOKENS],
    "all": PROMPTS["70 a"],
}
"""The first step computes all of them; one is the begin of another, of two whole blocks."""
STEP_TOKENS = 128
CACHE_BYTES = 1 << 20
"""64 blocks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("qwen3_moe", tmp_path_factory.mktemp("experts") / "model")


@pytest.fixture(scope="module")
def versions(folder: Path) -> list[Any]:
    return versions_of_experts(folder)


def config_of(folder: Path, **overrides: object) -> Config:
    options = {"block_size": BLOCK_TOKENS, "max_model_len": 256, "max_num_batched_tokens": STEP_TOKENS}
    settings = {"algorithm__routing_replay": "engine", "generator__engine_options": options} | overrides
    more = {"generator__max_running_groups": 16, "generator__kv_cache_bytes": CACHE_BYTES}
    return small_config(str(folder), **more, **settings)


Engines = Callable[..., VllmEngine]


@pytest.fixture(scope="module")
def make() -> Iterator[Engines]:
    """Makes engines, which stay until the last test: one that closes takes vLLM's process groups along."""
    engines: list[VllmEngine] = []
    set_num_threads = torch.set_num_threads

    def make(folder: Path, *, ahead: bool = False, **overrides: object) -> VllmEngine:
        with async_scheduling() if ahead else nullcontext():
            engines.append(VllmEngine(config_of(folder, **overrides), seed=1))
        return engines[-1]

    yield make
    close_all(engines)
    torch.set_num_threads = set_num_threads  # the engine replaced it


@pytest.fixture(scope="module")
def engine(make: Engines, folder: Path) -> VllmEngine:
    """Keeps the cache over swaps, and a batch in flight."""
    return make(folder, ahead=True)


def check_all(policy: Any, done: dict[str, Completion], prompts: dict[str, list[int]]) -> None:
    assert done.keys() == prompts.keys()
    for key, one in done.items():
        check_experts([policy], prompts[key], replace(one, versions=np.zeros_like(one.versions)))


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens whose experts came from the cache, of every request that found some there."""
    found: list[int] = []
    fill = RoutingRecords._fill

    def note(records: RoutingRecords, record: Any, start: int, block_tokens: int) -> None:
        found.extend([start] if start else [])
        fill(records, record, start, block_tokens)

    monkeypatch.setattr(RoutingRecords, "_fill", note)
    return found


def test_the_experts_are_those_of_the_models_own_routers(
    engine: VllmEngine, versions: list[Any], fills: list[int]
) -> None:
    """Prompts in several chunks, several completions at once, and members of a group with a common prompt."""
    engine.swap(0, weights_of(versions[0]))
    for key, prompt in PROMPTS.items():
        engine.add(key, prompt, kind="evaluation" if key == "4 a" else "training")
    done = run_all(engine)
    assert done.pop("4 a").routing is None
    check_all(versions[0], done, {key: prompt for key, prompt in PROMPTS.items() if key != "4 a"})
    assert set(fills) >= {BLOCK_TOKENS, 2 * BLOCK_TOKENS}, "no prompt came from the cache"


def check_swaps(engine: VllmEngine, versions: list[Any], kv_cache: str, dropped: int) -> None:
    """Swaps after 5 and 11 steps."""
    for key, one in swap_in_flight(engine, versions, SHORT, dropped).items():
        check_experts(versions, SHORT[key], one, recomputes=kv_cache == "recompute")


def test_a_token_has_the_experts_of_the_weights_that_sampled_the_next(engine: VllmEngine, versions: list[Any]) -> None:
    check_swaps(engine, versions, "keep", dropped=0)


def test_a_prompt_that_is_computed_again_has_the_experts_of_the_last_time(
    make: Engines, folder: Path, versions: list[Any]
) -> None:
    """With a batch in flight, which the swap drops."""
    options = {"block_size": BLOCK_TOKENS, "max_model_len": 256}  # all are computed again in one step
    engine = make(folder, ahead=True, weights__kv_cache="recompute", generator__engine_options=options)
    check_swaps(engine, versions, "recompute", dropped=1)


def test_requests_that_sleep_or_are_preempted_or_aborted_leave_the_experts_of_what_is_cached(
    engine: VllmEngine, versions: list[Any], fills: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted: list[str] = []
    preempt = Scheduler._preempt_request

    def note(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(scheduler, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", note)
    engine.swap(0, weights_of(versions[0]))
    prompt = [7] * (BLOCK_TOKENS + 1)
    engine.add("gone", prompt)
    engine.step()
    engine.abort(["gone"])  # while its only batch is in flight
    engine.add("next", prompt)
    check_all(versions[0], run_all(engine), {"next": prompt})
    assert fills == [BLOCK_TOKENS]
    engine.add("asleep", PROMPTS["70 a"])
    for _ in range(8):
        engine.step()
    engine.sleep(1)
    engine.wake("weights")
    engine.wake("cache")
    check_all(versions[0], run_all(engine), {"asleep": PROMPTS["70 a"]})
    assert len(preempted) == 1
    almost_full = (4 * PROMPTS["70 a"])[: 7 * BLOCK_TOKENS - 2]  # blocks: the second token takes another
    many = {str(first): [first, *almost_full] for first in range(3, 23)}
    for key, prompt in many.items():
        engine.add(key, prompt)
    check_all(versions[0], run_all(engine), many)
    assert len(preempted) > 1, "the cache was large enough"
    records = engine._watch.routing
    assert records is not None and len(records._cached) <= 2 * 64 + 1
    engine.add("last", [5])
    run_all(engine)
    assert not records._records.keys() - {"last"}


@pytest.mark.slow
def test_prompts_are_not_cached_with_a_sliding_window(make: Engines, tmp_path: Path, fills: list[int]) -> None:
    folder = save_family("mixtral", tmp_path)
    settings = folder / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"sliding_window": 16}))
    policy = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval().requires_grad_(False)
    engine = make(folder)
    engine.use_own_weights(0)
    for key, prompt in PROMPTS.items():
        engine.add(key, prompt)
    check_all(policy, run_all(engine), PROMPTS)
    assert not fills


def test_what_cannot_be_recorded_is_refused(model_path: str) -> None:
    with pytest.raises(ConfigError, match=r"routing_replay = 'engine': the model of type qwen2 at .* has no experts"):
        VllmEngine(config_of(Path(model_path)), seed=1)
    with pytest.raises(ConfigError, match=r"model runner V2 only, and uses V1 here; use generator.engine=transformers"):
        _record_routing(SimpleNamespace(use_v2_model_runner=False), on_gpu=True)  # type: ignore[arg-type]
    refused = r"the routers of model.path = 'm' do not tell vLLM their choice .*OtherRouter.*; use generator.engine="
    error = ValueError("Routed-experts capture is not supported with router OtherRouter.")
    assert re.search(refused, str(explained(error, "m", has_adapter=False)))
    assert explained(ValueError("something else"), "m", has_adapter=True) is None


def test_experts_of_another_shape_and_batches_without_any_are_refused() -> None:
    records = RoutingRecords(Routers(layers=2, chosen=2, experts=4, normalized=True))
    request: Any = SimpleNamespace(num_prompt_tokens=1, max_tokens=1, num_tokens=1, block_hashes=[])
    new: Any = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="a")], total_num_scheduled_tokens=1, num_scheduled_tokens={"a": 1}
    )
    scheduler: Any = SimpleNamespace(block_size=16)
    records.scheduled(new, {"a": request})
    with pytest.raises(
        ConfigError, match=r"vLLM has 3 layers with 2 experts of a token, but config.json .* has 2 with 2"
    ):
        rows = np.zeros((1, 3, 2), np.uint8)
        records.taken(new, {"a": SimpleNamespace(token_start=0, rows=rows)}, scheduler)  # type: ignore[dict-item]
    records.scheduled(new, {"a": request})
    with pytest.raises(InvariantError, match="returned a batch without its experts"):
        records.taken(new, None, scheduler)


@pytest.mark.parametrize("resumed_is_new", [False, True], ids=["first runner", "second runner"])
def test_a_preempted_request_keeps_the_experts_of_its_completion(resumed_is_new: bool) -> None:
    """The second runner, which all GPUs use, has a resumed request among the new ones."""
    records = RoutingRecords(Routers(layers=2, chosen=2, experts=8, normalized=True))
    request: Any = SimpleNamespace(num_prompt_tokens=4, max_tokens=5, num_tokens=4, block_hashes=[])
    pool = SimpleNamespace(num_gpu_blocks=100)
    scheduler: Any = SimpleNamespace(
        block_size=16, requests={"a": request}, kv_cache_manager=SimpleNamespace(block_pool=pool)
    )
    passes = [(0, 4, 1, True), (4, 1, 2, False), (5, 1, 3, False), (0, 7, 5, resumed_is_new), (7, 1, 6, False)]
    for start, count, expert, is_new in passes:
        request.num_tokens = start + count
        batch: Any = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id="a")] if is_new else [], total_num_scheduled_tokens=count
        )
        records.scheduled(batch, {"a": request})
        rows = np.full((count, 2, 2), expert, np.uint8)
        records.taken(batch, {"a": SimpleNamespace(token_start=start, rows=rows)}, scheduler)  # type: ignore[dict-item]
    assert records.pop("a")[:, 0, 0].tolist() == [5, 5, 5, 1, 2, 3, 5, 6]
