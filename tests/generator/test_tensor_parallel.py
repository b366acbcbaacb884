"""An engine whose model is divided between two worker processes: against one process and the model's own forward pass;
weights in several buckets, and the end of its processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from generator_model import (
    async_scheduling,
    kept_cache_logprobs,
    reference_logprobs,
    run_all,
    small_config,
    swap_in_flight,
    weights_of,
)
from transformers import Qwen2ForCausalLM

from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.generator.engine import Completion
from asyncrl.generator.vllm_backend import shared_weights
from asyncrl.generator.vllm_backend.engine import VllmEngine
from asyncrl.weights.layout import WeightManifest, plan_buckets, shares_of_ranks

TOLERANCE = 1e-4
DIFFERENT = 1e-2
BUCKET_BYTES = 40_000
"""Less than half of the model's weights, more than its largest tensor."""
ROWS_BYTES = 4_000
"""Less than the embedding has."""
PROMPTS = {str(i): [3 + (7 * i + 5 * j) % 60 for j in range(4 + i)] for i in range(8)}
END_S = 10.0
SILENT_S = 10.0

Policies = list[Qwen2ForCausalLM]


@pytest.fixture(scope="module")
def small_buckets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_weights, "BUCKET_BYTES", BUCKET_BYTES)
        yield


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of temporary files that no other process has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
        yield


@pytest.fixture(scope="module")
def divided(model_path: str, small_buckets: None, temporary: None) -> Iterator[VllmEngine]:
    """An engine of two workers that keeps the cache over swaps."""
    engine = VllmEngine(small_config(model_path, generator__tensor_parallel=2), seed=1)
    yield engine
    engine.close()


def pids_of(engine: VllmEngine) -> list[int]:
    return [pid for pid in engine._workers.pids if pid is not None]


def complete(engine: VllmEngine, kind: str = "training") -> dict[str, Completion]:
    for key, prompt in PROMPTS.items():
        engine.add(key, prompt, kind=kind)  # type: ignore[arg-type]
    return run_all(engine)


def max_difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def test_two_workers_sample_what_one_process_does(
    divided: VllmEngine, make_engine: Callable[..., VllmEngine], policies: Policies
) -> None:
    alone = make_engine()
    for version, policy in enumerate(policies):
        for engine in (alone, divided):
            engine.swap(version, weights_of(policy))
        whole, halves = complete(alone, "greedy"), complete(divided, "greedy")
        for key, completion in halves.items():
            assert completion.tokens == whole[key].tokens
            assert max_difference(completion.logprobs, whole[key].logprobs) < TOLERANCE
        for key, completion in complete(divided).items():
            expected = reference_logprobs(policy, PROMPTS[key], completion.tokens, 1.0)
            assert max_difference(completion.logprobs, expected) < TOLERANCE
            assert np.all(completion.versions == version)


def test_keep_continues_on_the_keys_and_values_of_both_workers(divided: VllmEngine, policies: Policies) -> None:
    for key, completion in swap_in_flight(divided, policies, PROMPTS).items():
        expected = kept_cache_logprobs(policies, PROMPTS[key], completion, 1.0)
        assert max_difference(completion.logprobs, expected) < TOLERANCE


def test_buckets_in_shared_memory_are_loaded_by_both_workers(divided: VllmEngine, policies: Policies) -> None:
    divided.swap(0, weights_of(policies[0]))
    divided.loader._by_rows = frozenset(["model.embed_tokens.weight"])
    try:
        load_from_shared_memory(divided, 1, policies[1])
    finally:
        divided.loader._by_rows = frozenset()
    for key, completion in complete(divided).items():
        expected = reference_logprobs(policies[1], PROMPTS[key], completion.tokens, 1.0)
        assert max_difference(completion.logprobs, expected) < TOLERANCE
        assert np.all(completion.versions == 1)


def load_from_shared_memory(engine: VllmEngine, version: int, policy: Qwen2ForCausalLM) -> None:
    """As a receiver does: into two buckets in turn, whose memory all processes have mapped."""
    weights = weights_of(policy)
    layout = WeightManifest.of((name, tensor.dtype, tensor.shape) for name, tensor in weights)
    shares = shares_of_ranks(layout, 1, ROWS_BYTES, by_parameter=True)
    plan = plan_buckets(layout, shares, ROWS_BYTES, engine.loader.takes_rows)
    assert sum(row is not None for bucket in plan for _, row in bucket.entries) > 2
    memory = engine.loader.bucket_memory(2 * max(bucket.num_bytes for bucket in plan))
    assert memory is not None
    engine.loader.begin(version, {name: tuple(tensor.shape) for name, tensor in weights})
    for number, bucket in enumerate(plan):
        parts = bucket.parts(memory.chunk(2)[number % 2])
        for part in parts:
            tensor = dict(weights)[part.name]
            first = part.first_row or 0
            part.tensor.copy_(tensor[first : first + len(part.tensor)])
        engine.loader.load(parts)
    engine.loader.commit(version)
    assert len({file for file in shared_files(os.getpid()) if "asyncrl-weights" in file}) == 1, "no second memory"


def test_weights_that_do_not_fit_change_nothing(divided: VllmEngine, policies: Policies) -> None:
    divided.swap(1, weights_of(policies[1]))
    with pytest.raises(RunError, match=r"weights of version 2 do not fit .* is missing"):
        divided.swap(2, weights_of(policies[2])[1:])
    for key, completion in complete(divided).items():
        expected = reference_logprobs(policies[1], PROMPTS[key], completion.tokens, 1.0)
        assert max_difference(completion.logprobs, expected) < TOLERANCE


def test_all_memory_of_the_processes_is_without_a_name(divided: VllmEngine, policies: Policies) -> None:
    divided.swap(0, weights_of(policies[0]))
    assert not list(Path(tempfile.gettempdir()).glob("vllm_dist_*"))
    for pid in (os.getpid(), *pids_of(divided)):
        files = shared_files(pid)
        assert any("memfd:asyncrl-weights" in file for file in files)
        assert any("psm_" in file for file in files)
        assert not named_files(pid)


def test_the_peak_of_the_memory_has_the_workers(divided: VllmEngine, policies: Policies) -> None:
    divided.swap(0, weights_of(policies[0]))  # at which the workers report it
    peaks = [int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) << 10
             for pid in (os.getpid(), *pids_of(divided))]  # fmt: skip
    assert divided.peak_memory_bytes() == pytest.approx(sum(peaks), rel=0.05)
    assert sum(peaks) > 1.5 * peaks[0]


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_every_token_is_of_the_version_that_it_carries_also_with_a_batch_in_flight(
    model_path: str, small_buckets: None, policies: Policies, kv_cache: str
) -> None:
    config = small_config(model_path, generator__tensor_parallel=2, weights__kv_cache=kv_cache)
    with async_scheduling():
        engine = VllmEngine(config, seed=1)
    try:
        done = swap_in_flight(engine, policies, PROMPTS, dropped=int(kv_cache == "recompute"))
    finally:
        engine.close()
    for key, completion in done.items():
        if kv_cache == "keep":
            expected = kept_cache_logprobs(policies, PROMPTS[key], completion, 1.0)
            assert max_difference(completion.logprobs, expected) < TOLERANCE
            continue
        for version in np.unique(completion.versions):
            here = completion.versions == version
            own, other = (
                reference_logprobs(policies[v], PROMPTS[key], completion.tokens, 1.0)[here]
                for v in (version, (version + 1) % 3)
            )
            assert max_difference(completion.logprobs[here], own) < TOLERANCE
            assert max_difference(completion.logprobs[here], other) > DIFFERENT


@pytest.mark.slow
def test_the_end_of_a_worker_ends_the_engine_at_once(model_path: str, policies: Policies) -> None:
    engine = VllmEngine(small_config(model_path, generator__tensor_parallel=2), seed=1)
    try:
        engine.swap(0, weights_of(policies[0]))
        for key, prompt in PROMPTS.items():
            engine.add(key, prompt)
        engine.step()
        pids = pids_of(engine)
        os.kill(pids[1], signal.SIGKILL)
        killed_s = time.monotonic()
        expected = rf"a worker of the engine has ended .*process {pids[1]} was killed by signal SIGKILL"
        with pytest.raises(PeerTimeoutError, match=expected):
            while True:
                engine.step()
        assert time.monotonic() - killed_s < END_S
        with pytest.raises(PeerTimeoutError, match=expected):  # what an idle generator looks at
            _ = engine.num_running
        with pytest.raises(PeerTimeoutError, match=expected):
            engine.swap(1, weights_of(policies[1]))
    finally:
        engine.close()
    await_end(pids)


@pytest.mark.slow
def test_a_worker_that_does_not_answer_is_given_up(model_path: str, policies: Policies) -> None:
    config = small_config(model_path, generator__tensor_parallel=2, launch__start_timeout_s=SILENT_S)
    engine = VllmEngine(config, seed=1)
    try:
        engine.swap(0, weights_of(policies[0]))
        os.kill(pids_of(engine)[1], signal.SIGSTOP)
        stopped_s = time.monotonic()
        with pytest.raises(PeerTimeoutError, match=r"did not answer within launch.start_timeout_s = 10 s"):
            complete(engine)
        assert SILENT_S <= time.monotonic() - stopped_s < SILENT_S + END_S
    finally:
        pids = pids_of(engine)
        engine.close()
    await_end(pids)


def test_a_worker_whose_generator_ended_before_it_was_ready_ends(tmp_path: Path) -> None:
    code = (
        "import multiprocessing, os, pathlib, time\n"
        "from types import SimpleNamespace\n"
        "from asyncrl.generator.vllm_backend.patches import prepare_worker\n"
        "def work():\n"
        "    while os.getppid() == multiprocessing.parent_process().pid:\n"
        "        time.sleep(0.01)\n"
        "    prepare_worker(SimpleNamespace(parallel_config=SimpleNamespace(world_size=2)))\n"
        f"    pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "if __name__ == '__main__':\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    worker.start()\n"
        "    print(worker.pid, flush=True)\n"
        "    os._exit(0)\n"
    )
    script = tmp_path / "generator.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, timeout=60)
    await_end([int(result.stdout)])
    assert not (tmp_path / "ready").exists()


@pytest.mark.slow
def test_a_killed_generator_leaves_no_worker_and_no_memory(model_path: str) -> None:
    code = (
        "import os, time\n"
        "from test_tensor_parallel import pids_of, small_config\n"
        "from asyncrl.generator.vllm_backend.engine import VllmEngine\n"
        "if __name__ == '__main__':\n"
        f"    engine = VllmEngine(small_config({model_path!r}, generator__tensor_parallel=2), seed=1)\n"
        "    print('workers', *pids_of(engine), flush=True)\n"
        "    time.sleep(600)\n"
    )
    script = Path(model_path, "generator_to_kill.py")
    script.write_text(code)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, str(script)], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("workers"))
        pids = [int(pid) for pid in line.split()[1:]]
        assert len(pids) == 2
        assert not set().union(*map(named_files, (process.pid, *pids)))
    finally:
        process.kill()
        process.wait()
    await_end(pids)


def mapped(pid: int) -> list[list[str]]:
    """The fields of the lines about files in the memory map of a process: the fifth is the inode, the last the path."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [fields for fields in (line.split(maxsplit=5) for line in lines) if len(fields) == 6]


def shared_files(pid: int) -> list[str]:
    """The files of shared memory that a process has mapped."""
    return [fields[5] for fields in mapped(pid) if fields[5].startswith(("/dev/shm/", "/memfd:asyncrl"))]


def named_files(pid: int) -> set[str]:
    """The files that still have a name: a semaphore is made under another one, by which the map shows it."""
    inodes = {fields[4] for fields in mapped(pid) if fields[5].startswith("/dev/shm/")}
    return {entry.name for entry in os.scandir("/dev/shm") if str(entry.inode()) in inodes}


def await_end(pids: list[int]) -> None:
    deadline_s = time.monotonic() + END_S
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline_s, f"processes {left} still run"
        time.sleep(0.05)
