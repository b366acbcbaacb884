"""The processes of the weights row: `python -m benchmarks.weights_sides ROLE ...`; the last line of the measuring one
is its result as JSON."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from statistics import median

TENSORS = 16
WARM = 2
TIMEOUT_S = 120.0
BUCKET_BYTES = 64 << 20
"""The default of `weights.bucket_bytes`."""


def send(port: int, receivers: int, num_bytes: int, versions: int) -> None:
    """The learner's side: seconds from `send` until all have a version, median."""
    import torch

    from asyncrl.weights.sender import WeightSender

    weights = [(f"layer-{i}", torch.full((num_bytes // 4 // TENSORS,), float(i))) for i in range(TENSORS)]
    sender = WeightSender(
        ("127.0.0.1", port), expected_generators=receivers, transport="auto", bucket_bytes=BUCKET_BYTES,
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    sender._roster.await_members(receivers, TIMEOUT_S)
    seconds: list[float] = []
    for version in range(WARM + versions):
        started_s = time.perf_counter()
        sender.send(version, weights)
        sender.wait()
        seconds.append(time.perf_counter() - started_s)
    if sender.stats.dropped:
        raise SystemExit(f"{sender.stats.dropped} receivers were dropped")
    print(json.dumps(median(seconds[WARM:])), flush=True)


def receive(port: int, rank: int, num_bytes: int) -> None:
    """A generator's side: takes every version, until it is killed."""
    from asyncrl.weights.receiver import WeightReceiver

    receiver = WeightReceiver(
        ("127.0.0.1", port), rank=rank, transport="auto", timeout_s=TIMEOUT_S, max_bytes=2 * num_bytes
    )
    receiver.start()
    while True:
        staged = receiver.staged()
        if staged is None:
            time.sleep(0.0005)
        else:
            receiver.loaded(staged)


def gloo(port: int, receivers: int, num_bytes: int, versions: int, rank: int) -> None:
    """One rank of a bare broadcast: seconds of one, median, as rank 0 sees it."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, receivers + 1, rank == 0, timedelta(seconds=TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=receivers + 1)
    data = torch.zeros(num_bytes // 4)
    seconds: list[float] = []
    for _ in range(WARM + versions):
        dist.barrier()
        started_s = time.perf_counter()
        dist.broadcast(data, 0)
        dist.barrier()
        seconds.append(time.perf_counter() - started_s)
    print(json.dumps(median(seconds[WARM:])), flush=True)


def swap(model: str, swaps: int) -> None:
    """An engine that decodes: milliseconds of a step, of a swap, and of copying as many bytes."""
    import torch

    from asyncrl.config import load_config
    from asyncrl.generator.engine import Engine

    config = load_config("demo", {"model.path": model, "generator.max_new_tokens": 48})
    engine = Engine(config, seed=0)
    tensors = [(name, tensor.clone()) for name, tensor in _weights_of(model)]
    target = [tensor.clone() for _, tensor in tensors]
    steps, stalls, copies = [], [], []
    for version in range(WARM + swaps):
        while engine.num_running < 200:
            engine.add(f"{version}-{time.monotonic_ns()}", _prompt(), kind="training", seed=None)
        for _ in range(20):
            started_s = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - started_s)
        stalls.append(engine.swap(version, tensors) / 1e3)
        started_s = time.perf_counter()
        for (_, source), copy in zip(tensors, target, strict=True):
            copy.copy_(source)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        copies.append(time.perf_counter() - started_s)
    engine.close()
    print(json.dumps({"step": median(steps), "stall": median(stalls[WARM:]), "copy": median(copies[WARM:])}))


def _weights_of(model: str):
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model)
    names = set(dict(policy.named_parameters()))
    return [(name, tensor.detach()) for name, tensor in policy.state_dict().items() if name in names]


def _prompt():
    import numpy as np

    return np.arange(4, 12, dtype=np.int32)


ROLES = {"send": send, "receive": receive, "gloo": gloo, "swap": swap}

if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    ROLES[role](*(int(text) if text.isdigit() else text for text in arguments))
