"""The labels of tokens while batches are in flight: vLLM's own step over batches that are complete late."""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from asyncrl.errors import InvariantError, RunError
from asyncrl.generator.vllm_backend.scheduling import BatchWatch, check_first_versions


class LateFuture(Future):
    """Complete when it is asked for its result, long after its batch was started."""

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self.computed_with)
        return super().result(timeout)

    def __init__(self, computed_with: int) -> None:
        super().__init__()
        self.computed_with = computed_with


class FakeExecutor:
    """Computes a batch with the weights that are loaded when it is started."""

    weights = 0

    def execute_model(self, batch: Any, non_block: bool = False) -> Future:
        future: Future = Future()
        future.set_result(None)
        return future

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        return LateFuture(self.weights) if non_block else self.weights


class FakeScheduler:
    """Always has requests, until `stopped`; the output of a batch is the version that computed it."""

    stopped = False
    requests = MappingProxyType[str, Any]({})

    def has_requests(self) -> bool:
        return not self.stopped

    def schedule(self, throttle_prefills: bool = False) -> Any:
        return SimpleNamespace(
            total_num_scheduled_tokens=1,
            pending_structured_output_tokens=False,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=()),
        )

    def get_grammar_bitmask(self, batch: Any) -> None:
        return None

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        return {0: SimpleNamespace(computed_with=model_runner_output, weight_version=None)}


def make_core(labels: BatchWatch, batches: int) -> Any:
    """vLLM's engine core with `batches` batches in flight at most, without what needs a model."""
    from vllm.v1.engine.core import EngineCore

    core: Any = EngineCore.__new__(EngineCore)
    core.scheduler = FakeScheduler()
    labels.attach(core.scheduler, core.set_weight_version)
    core.model_executor = FakeExecutor()
    core.batch_queue_size, core.batch_queue = batches, deque(maxlen=batches)
    core.is_mm_encoder_only = core.is_pooling_model = core.check_for_draft_tokens = False
    core.log_error_detail = core.capture_iteration_details = lambda batch: nullcontext()
    core._attach_iteration_details = lambda outputs, details: None
    core._process_aborts_queue = lambda: None
    core.step_fn = core.step if batches == 1 else core.step_with_batch_queue
    return core


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_every_batch_carries_the_version_that_computed_it(batches: int) -> None:
    labels, draw = BatchWatch(), random.Random(batches)
    labels.version = 0
    core = make_core(labels, batches)
    taken: list[tuple[int, str]] = []
    late = 0
    for step in range(300):
        core.scheduler.stopped = step >= 290 or draw.random() < 0.1  # then what is in flight is taken
        outputs, _ = core.step_fn()
        taken += [(output.computed_with, output.weight_version) for output in (outputs or {}).values()]
        late += bool(taken) and taken[-1][0] != labels.version
        if draw.random() < 0.4:
            labels.version = core.model_executor.weights = labels.version + 1
    assert not core.batch_queue
    assert len(taken) > 200
    assert [label for _, label in taken] == [str(version) for version, _ in taken]
    assert len({version for version, _ in taken}) > 50
    assert (late > 50) == (batches > 1)  # labelled when it is taken, a token would carry the wrong version


def test_batches_that_are_not_taken_in_order_are_an_error() -> None:
    labels = BatchWatch()
    labels.attach(FakeScheduler(), lambda label: None)  # type: ignore[arg-type]
    first, second = FakeScheduler().schedule(), FakeScheduler().schedule()
    labels.scheduled(first, {})
    labels.scheduled(second, {})
    with pytest.raises(InvariantError, match="a batch that is not the oldest in flight"):
        labels.taken(second)
    labels.taken(first)
    labels.taken(second)
    with pytest.raises(InvariantError, match="a batch that is not the oldest in flight"):
        labels.taken(second)


@pytest.mark.parametrize("versions", [[], ["1", "2"], ["0", "0"], ["0", "1", "2"], ["default"]])
def test_a_vllm_that_labels_otherwise_is_refused(versions: list[str]) -> None:
    import vllm

    spans: Any = [SimpleNamespace(version=version) for version in versions]
    with pytest.raises(RunError, match=rf"vLLM {vllm.__version__} labels the first tokens with the versions \["):
        check_first_versions(spans)
    check_first_versions([SimpleNamespace(version="0"), SimpleNamespace(version="1")])  # type: ignore[list-item]
