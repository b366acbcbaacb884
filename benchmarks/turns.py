"""Measures the cost of sharing a core: steps of an engine while another one computes on its core, against steps alone.

Blocks with and without the other engine alternate in one run. A learner trains on the other core all the time, as in a
run. Half of the median ratio is `turns` of the simulator, for this machine at this time.

    python -m benchmarks.turns
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from statistics import median, quantiles

from asyncrl.util.processes import set_time_slice, use_batch_scheduling
from benchmarks.long_tail import MAX_TOKENS, prepare_long_tail, settings

BLOCK_S = 0.8
READY_S = 180.0
ENGINE_CORE, LEARNER_CORE = 1, 0
BATCH, LENGTH_TOKENS = 64, 64
"""Shape of the learner's batches."""


def engine_step(model: str, running: int) -> Callable[[], None]:
    """Starts an engine and returns a function that runs one step with `running` sequences."""
    from asyncrl.config.load import load_config, parse_override
    from asyncrl.generator.vllm_backend.setup import set_environment

    overrides = settings(model, steps=1, max_staleness=0, quick=False)
    config = load_config("demo", dict(parse_override(text) for text in overrides))
    set_environment(config)
    from vllm import TokensPrompt

    from asyncrl.generator.vllm_backend.requests import sampling_params
    from asyncrl.generator.vllm_backend.setup import build_engine
    from asyncrl.generator.vllm_backend.version_labels import VersionLabels
    from benchmarks.synchronous import all_prompts

    use_batch_scheduling()
    engine, prompts, begun = build_engine(config, 0, VersionLabels()), all_prompts(config), 0
    sampling = sampling_params(config, {"temperature": 1.0}).clone()
    sampling.ignore_eos, sampling.max_tokens = True, MAX_TOKENS

    def step() -> None:
        nonlocal begun
        while engine.get_num_unfinished_requests() < running:
            begun += 1
            engine.add_request(str(begun), TokensPrompt(prompt_token_ids=next(prompts)), sampling)
        engine.step()

    for _ in range(50):
        step()
    set_time_slice()
    return step


def measured(model: str, running: int, blocks: int, ready: Barrier, times: Queue[list[float]]) -> None:
    """Puts the mean seconds of a step in each block into `times`."""
    os.sched_setaffinity(0, {ENGINE_CORE})
    step, found = engine_step(model, running), list[float]()
    ready.wait(READY_S)
    began_s = time.monotonic()
    for block in range(blocks):
        steps, block_s = 0, time.monotonic()
        while time.monotonic() < began_s + (block + 1) * BLOCK_S:
            step()
            steps += 1
        found.append((time.monotonic() - block_s) / steps)
    times.put(found)


def other(model: str, running: int, blocks: int, ready: Barrier) -> None:
    """Computes in every second block."""
    os.sched_setaffinity(0, {ENGINE_CORE})
    step = engine_step(model, running)
    ready.wait(READY_S)
    began_s = time.monotonic()
    while (block := int((time.monotonic() - began_s) / BLOCK_S)) < blocks:
        if block % 2:
            step()
        else:  # sleeps once per block: each wake-up would take the core from the measured engine
            time.sleep(max(0.0, began_s + (block + 1) * BLOCK_S - time.monotonic()))


def learner(model: str, blocks: int, ready: Barrier) -> None:
    os.sched_setaffinity(0, {LEARNER_CORE})
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-6)
    tokens = torch.randint(2, 60, (BATCH, LENGTH_TOKENS))
    ready.wait(READY_S)
    end_s = time.monotonic() + blocks * BLOCK_S
    while time.monotonic() < end_s:
        trained(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def measure(model: str, *, running: int, blocks: int) -> tuple[float, list[float]]:
    """Returns the median seconds of a step alone, and for each block with the other engine the ratio of its step time
    to that of the blocks before and after it."""
    spawn = multiprocessing.get_context("spawn")
    ready, times = spawn.Barrier(3), spawn.Queue()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    roles = [
        spawn.Process(target=measured, args=(model, running, blocks, ready, times)),
        spawn.Process(target=other, args=(model, running, blocks, ready)),
        spawn.Process(target=learner, args=(model, blocks, ready)),
    ]
    for role in roles:
        role.start()
    found = times.get(timeout=READY_S + 2 * blocks * BLOCK_S)
    for role in roles:
        role.join(READY_S)
    return median(found[::2]), [2 * found[i] / (found[i - 1] + found[i + 1]) for i in range(1, blocks - 1, 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=32, help="Sequences in each engine.")
    parser.add_argument("--blocks", type=int, default=121)
    options = parser.parse_args()
    alone_s, ratios = measure(prepare_long_tail(), running=options.running, blocks=options.blocks)
    low, middle, high = quantiles(ratios, n=4)
    print(
        f"{options.running} sequences: a step alone {1e3 * alone_s:.2f} ms, with another engine {middle:.3f} times "
        f"that (quartiles {low:.3f}, {high:.3f}), {middle / 2:.3f} of its share"
    )


if __name__ == "__main__":
    main()
