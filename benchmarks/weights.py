"""Measures the time of a version from the learner to its generators, and for which a weight swap stalls an engine.

A version may take 10 ms and 1.15 times a bare gloo broadcast of its bytes, which is measured in turn with it, and hold
the learner for a copy of one bucket. Every receiver has a separate core, as hosts have. A version in buckets
(`weights.staging`), until it is loaded, is compared with one that is staged, and not loaded yet.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from asyncrl.launch.machine import find_port
from asyncrl.weights.layout import WeightManifest
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.sender import WeightSender
from asyncrl.weights.staging import StagedWeights
from asyncrl.wire.sockets import socket_folder
from benchmarks.demo import prepare_cold
from benchmarks.frame import CannotRun, Limit, Round, Row
from benchmarks.worker import Worker, answer, instructions

SIDES = "benchmarks.weights"
SIZES = {"100 MB": 10**8, "1 GB": 10**9}
PAIRS = {"100 MB": 8, "1 GB": 3}
"""Number of versions sent in a round, each by asyncrl and by a bare broadcast."""
BUCKET_PAIRS = 3
"""The same for versions in buckets."""
RECEIVERS = (1, 2, 4)
"""Numbers of receivers, as far as the machine has cores for them and the learner."""
OWN_S, LINK_FACTOR = 0.01, 1.15
MAY_TAKE, MAY_HOLD = "of 10 ms + 1.15 links", "learner held, of a bucket's copy"


class Ranks:
    """The learner's process and the generators' processes, on a core each, which follow instructions until the stack
    ends."""

    def __init__(self, stack: ExitStack, receivers: int) -> None:
        self._sockets = stack.enter_context(socket_folder())
        cores = sorted(os.sched_getaffinity(0))
        self._workers = [Worker(SIDES, "rank", rank, cores=[cores[rank]], stack=stack) for rank in range(receivers + 1)]

    def measure(self, receivers: int, num_bytes: int, pairs: int, staging: str = "whole") -> dict[str, float]:
        """Returns the median seconds of a version to the first `receivers` ranks, by what takes them."""
        bare_port = find_port()
        for worker in self._workers[: receivers + 1]:
            worker.tell([bare_port, f"ipc://{self._sockets}/{bare_port}", receivers, num_bytes, pairs, staging])
        return self._workers[0].answer()


def stall(model: str, swaps: int) -> Round:
    """Returns the swap figures of an engine that runs alone on the first core."""
    with ExitStack() as stack:
        times = Worker(SIDES, "swap", model, swaps, cores=[min(os.sched_getaffinity(0))], stack=stack).answer()
    return {
        "stall": times["stall"] / (times["copy"] + times["step"]),
        **{f"{name} ms": 1e3 * seconds for name, seconds in times.items()},
    }


def measure(quick: bool) -> Iterator[Round]:
    model = prepare_cold()
    counts = [count for count in RECEIVERS[: 1 if quick else None] if count < len(os.sched_getaffinity(0))]
    if not counts:
        raise CannotRun("needs 2 cores: one for the learner, and one for a generator")
    while True:
        figures: Round = {}
        with ExitStack() as stack:
            ranks = Ranks(stack, max(counts))
            for size in list(SIZES)[: 1 if quick else None]:
                for receivers in counts:
                    figures |= version_figures(size, receivers, ranks.measure(receivers, SIZES[size], PAIRS[size]))
                buckets = ranks.measure(1, SIZES[size], BUCKET_PAIRS, "buckets")
                figures[f"into the engine in buckets ms, {size}"] = 1e3 * buckets["own"]
        yield figures | stall(model, 5 if quick else 20)


def version_figures(size: str, receivers: int, times: dict[str, float]) -> Round:
    """Returns the figures of a size: against what it may take and hold the learner, and in ms."""
    name = f"{size} to {receivers}"
    ratios: Round = {f"{MAY_TAKE}, {name}": times["own"] / (OWN_S + LINK_FACTOR * times["bare"])}
    if receivers == 1:
        ratios[f"{MAY_HOLD}, {size}"] = times["held"] / times["bucket"]
    return ratios | {f"{part} ms, {name}": 1e3 * seconds for part, seconds in times.items()}


ROW = Row(
    what="time of a version from the learner to 1, 2 and 4 generators, and for which it holds the learner; stall of an "
    "engine by a swap",
    against="10 ms and 1.15 bare gloo broadcasts; copying one bucket; copying the bytes and one engine step",
    limits={
        **{f"{MAY_TAKE}, {size} to {count}": Limit(1.0, at_most=True) for size in SIZES for count in RECEIVERS},
        **{f"{MAY_HOLD}, {size}": Limit(1.0, at_most=True) for size in SIZES},
        "stall": Limit(1.0, at_most=True),
    },
    measure=measure,
)


TENSORS = 16
WARM = 2
TIMEOUT_S = 120.0
REST_S = 0.15
"""Pause before a version is sent, after which every receiver waits for it, as in a run."""
UPDATE_S = 1.0
"""Time from sending a version to the next update, in which a trainer computes."""
BUCKET_BYTES = 64 << 20
"""As senders of a run."""
HOST = "127.0.0.1"


def rank(number: int) -> None:
    """Runs process `number` of the broadcasts; 0 is the learner. Each instruction is one measurement."""
    for bare_port, address, receivers, num_bytes, pairs, staging in instructions():
        on_device = torch.cuda.device_count() > receivers
        device = torch.device("cuda", number) if on_device else torch.device("cpu")
        if on_device:
            torch.cuda.set_device(device)
        store = TCPStore(HOST, bare_port, receivers + 1, number == 0, timedelta(seconds=TIMEOUT_S))
        backend = "nccl" if on_device else "gloo"
        dist.init_process_group(backend, store=store, rank=number, world_size=receivers + 1)
        if number == 0:
            answer(send(address, receivers, num_bytes, pairs, device, copies=staging == "whole"))
        else:
            receive(address, number, num_bytes, pairs, device, staging=staging)
        dist.destroy_process_group()


def send(
    address: str, receivers: int, num_bytes: int, pairs: int, device: torch.device, *, copies: bool
) -> dict[str, float]:
    """Runs the learner's side. Returns the median seconds from `send` until all receivers have a version (own), in
    `send`, and in `copied` when the next update is due, which hold the trainer (held), of a bare broadcast of the same
    bytes (bare), and of copying as many of them as are in a bucket (bucket)."""
    data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    weights = list(_parameters(data).items())
    sender = WeightSender(
        address, WeightManifest.of((name, tensor.dtype, tensor.shape) for name, tensor in weights),
        expected_generators=receivers, transport="auto", bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S,
        device=str(device), copies=copies,
    )  # fmt: skip
    target, waiter = torch.empty_like(data[:BUCKET_BYTES]), ThreadPoolExecutor(1)
    times: dict[str, list[float]] = {"own": [], "held": [], "bare": [], "bucket": []}
    for version in range(WARM + pairs):
        data.fill_(version)
        time.sleep(REST_S)
        started_s = time.perf_counter()
        sender.send(version, weights, copy_later=True)
        held_s = time.perf_counter() - started_s
        received = waiter.submit(_received, sender)
        time.sleep(UPDATE_S)
        update_s = time.perf_counter()
        sender.copied()
        times["held"].append(held_s + time.perf_counter() - update_s)
        times["own"].append(received.result() - started_s)
        dist.barrier()
        times["bare"].append(_broadcast(data))
        times["bucket"].append(_copy(data[:BUCKET_BYTES], target))
    if sender.stats.dropped:
        raise SystemExit(f"{sender.stats.dropped} receivers were dropped")
    dist.barrier()
    sender.close()
    return {name: median(seconds[WARM:]) for name, seconds in times.items()}


def _received(sender: WeightSender) -> float:
    """Returns when all receivers have the version."""
    sender.wait()
    return time.perf_counter()


def receive(address: str, number: int, num_bytes: int, pairs: int, device: torch.device, *, staging: str) -> None:
    """Runs a generator's side. It receives every version and the bare broadcast after it into the same memory, so that
    four receivers of a gigabyte fit a small machine."""
    receiver = WeightReceiver(
        address, rank=number, transport="auto", timeout_s=TIMEOUT_S, max_bytes=2 * num_bytes,
        device=str(device),
    )  # fmt: skip
    receiver.start()
    model = Model(num_bytes, device) if staging == "buckets" else None
    receiver.engine_is_up(model)
    for version in range(WARM + pairs):
        staged = _next(receiver) if model is None else model.load(receiver)
        tensors = staged.tensors if model is None else list(model.parameters.items())
        if staged.version != version or any(int(tensor.view(torch.uint8)[-1]) != version for _, tensor in tensors):
            raise SystemExit(f"version {staged.version} has other bytes than were sent as version {version}")
        data = torch.empty(0, dtype=torch.uint8, device=device).set_(tensors[0][1].untyped_storage())
        receiver.loaded(staged)
        dist.barrier()
        _broadcast(data[:num_bytes])
    dist.barrier()
    receiver.close()


class Model:
    """Parameters that buckets are copied into, in place of an engine."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.parameters = _parameters(torch.zeros(num_bytes, dtype=torch.uint8, device=device))

    def takes_rows(self, name: str) -> bool:
        """True, as the engine on transformers."""
        return True

    def bucket_memory(self, num_bytes: int) -> None:
        """There is no other process."""

    def load(self, receiver: WeightReceiver) -> StagedWeights:
        """Takes part in rounds until a version is there."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            if (current := receiver.round()) is None:
                time.sleep(0.005)
                continue
            current.accept()
            while not current.has_failed:
                if (parts := current.take(0.005)) is not None:
                    for part in parts:
                        target, first = self.parameters[part.name], part.first_row or 0
                        target[first : first + len(part.tensor)].copy_(part.tensor)
                    current.give_back()
                if current.committed is not None:
                    return current.committed
        raise SystemExit("no weights were received")


def _parameters(data: Tensor) -> dict[str, Tensor]:
    size = len(data) // TENSORS // 4 * 4
    return {f"layer-{i}": data[i * size : (i + 1) * size].view(torch.float32) for i in range(TENSORS)}


def _next(receiver: WeightReceiver) -> StagedWeights:
    deadline_s = time.monotonic() + TIMEOUT_S
    while (staged := receiver.staged()) is None:
        if time.monotonic() > deadline_s:
            raise SystemExit("no weights were received")
        time.sleep(0.005)
    return staged


def _broadcast(data: Tensor) -> float:
    """Returns the seconds of a bare broadcast, until all ranks have received it."""
    dist.barrier()
    started_s = time.perf_counter()
    dist.broadcast(data, 0)
    dist.barrier()
    return time.perf_counter() - started_s


def _copy(source: Tensor, target: Tensor) -> float:
    """Returns the seconds of a copy."""
    started_s = time.perf_counter()
    target.copy_(source)
    if target.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started_s


def swap(model: str, swaps: int) -> None:
    """Measures a decoding engine: median seconds of a step, of a swap, and of copying as many bytes."""
    import numpy as np
    from transformers import AutoModelForCausalLM

    from asyncrl.config.load import load_config
    from asyncrl.generator.vllm_backend.engine import VllmEngine

    config = load_config("demo", {"model.path": model, "generator.max_new_tokens": 48})
    engine = VllmEngine(config, seed=0)
    policy = AutoModelForCausalLM.from_pretrained(model)
    tensors = [(name, parameter.detach().clone()) for name, parameter in policy.named_parameters()]
    target = [tensor.clone() for _, tensor in tensors]
    steps, stalls, copies = [], [], []
    for version in range(WARM + swaps):
        stalls.append(engine.swap(version, tensors) / 1e3)
        started_s = time.perf_counter()
        for (_, source), copy in zip(tensors, target, strict=True):
            copy.copy_(source)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        copies.append(time.perf_counter() - started_s)
        for number in range(200 - engine.num_running):
            engine.add(f"{version}-{number}", np.arange(4, 12, dtype=np.int32))
        for _ in range(20):
            started_s = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - started_s)
    engine.close()
    answer({"stall": median(stalls[WARM:]), "copy": median(copies[WARM:]), "step": median(steps)})


ROLES = {"rank": rank, "swap": swap}

if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    ROLES[role](*(int(text) if text.isdigit() else text for text in arguments))
