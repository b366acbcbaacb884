"""Measures the generator against vLLM's default `LLM.generate`, with a weight swap every second.

The model is the demo's before its warm start, with completions of 1 to 48 tokens. Two figures:

    of LLM.generate        tokens/s of the generator inside `asyncrl launch`, against `LLM.generate` in a process before
    engine of LLM.generate tokens per second of processor time of the generator's engine and of `LLM.generate`, in
                           alternated blocks of one process: what a busy machine leaves comparable

The run has a learning rate so small that the lengths do not change, and a staleness limit so high that the generator
never waits. Its weights are swapped at every step, about once per second.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.config import Config
from asyncrl.config.load import load_config, parse_override
from benchmarks.demo import launched, prepare_cold, rows_of, summary_of
from benchmarks.frame import CannotRun, Limit, Round, Row, one_thread, output_of
from benchmarks.synchronous import all_prompts, make_llm, sampling

if TYPE_CHECKING:
    from vllm import LLM

    from asyncrl.generator.engine import Engine

RUN = "bench-generator"
RUNNING_GROUPS = 32
GROUP_SIZE = 8
NUM_REQUESTS, BLOCKS = 8192, 20
BLOCK_GROUPS = 64
SWAP_S = 1.0
STEPS = 20
TIMEOUT_S = 400.0


def overrides(model: str, steps: int) -> list[str]:
    return [
        f"model.path={model}", f"steps={steps}", "learner.lr=1e-12", "replay.max_staleness=1000",
        "replay.zero_variance=train", "replay.groups_per_step=64", "generator.max_new_tokens=48",
        f"generator.max_running_groups={RUNNING_GROUPS}", f"generator.group_size={GROUP_SIZE}",
    ]  # fmt: skip


def inside_launch(settings: list[str]) -> dict[str, float]:
    """Returns tokens/s of generator 0 while busy, from the middle of the run, and its swap stalls. The launcher assigns
    the first cores to generators."""
    shutil.rmtree(Path("runs") / RUN, ignore_errors=True)
    with launched(RUN, settings) as process:
        if process.wait(TIMEOUT_S):
            raise CannotRun(f"asyncrl launch ended with code {process.returncode}; see runs/{RUN}/logs")
    rows = rows_of(RUN)
    first, last = rows[len(rows) // 5], rows[-1]
    tokens, busy_s = (last[name] - first[name] for name in ("generator/tokens", "generator/busy_s"))
    return {"tokens_per_s": tokens / busy_s, **summary_of(RUN)["weight_sync"]}


def alone(core: int, side: str, settings: list[str], number: int) -> list[float]:
    """Returns what `of_llm` or `in_turns` prints, run in a separate process on the core."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "benchmarks.generator", side, str(number), *settings]
    environment = one_thread() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    printed = output_of(side, command, environment=environment, timeout_s=TIMEOUT_S)
    return json.loads(printed.splitlines()[-1])


def of_llm(config: Config, requests: int) -> list[float]:
    """Returns tokens/s of `LLM.generate`."""
    llm, prompts = make_llm(config), all_prompts(config)
    generated(llm, config, list(islice(prompts, 1000 // GROUP_SIZE)))
    asked = list(islice(prompts, requests // GROUP_SIZE))
    started_s = time.perf_counter()
    tokens = generated(llm, config, asked)
    return [tokens / (time.perf_counter() - started_s)]


def in_turns(config: Config, blocks: int) -> list[float]:
    """Returns, for each pair of blocks, tokens per second of processor time of the generator's engine over that of
    `LLM.generate`. The thread that is measured does all the work: libraries have one thread."""
    from transformers import AutoModelForCausalLM

    from asyncrl.generator.vllm_backend.engine import VllmEngine

    weights = [
        (name, one.data) for name, one in AutoModelForCausalLM.from_pretrained(config.model.path).named_parameters()
    ]
    llm, engine, prompts = make_llm(config), VllmEngine(config, seed=0), all_prompts(config)
    ratios: list[float] = []
    for block in range(-1, blocks):  # the first one warms up
        asked, rates = list(islice(prompts, BLOCK_GROUPS)), dict[str, float]()
        for side in ("engine", "llm")[:: 1 if block % 2 else -1]:
            started_s = time.thread_time()
            tokens = completed(engine, weights, asked) if side == "engine" else generated(llm, config, asked)
            rates[side] = tokens / (time.thread_time() - started_s)
        ratios.append(rates["engine"] / rates["llm"])
    return ratios[1:]


def generated(llm: LLM, config: Config, prompts: list[list[int]]) -> int:
    """Returns the tokens that `LLM.generate` makes of a group for each prompt."""
    from vllm import TokensPrompt

    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts for _ in range(GROUP_SIZE)]
    outputs = llm.generate(asked, sampling(config), use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def completed(engine: Engine, weights: list, prompts: list[list[int]]) -> int:
    """Returns the tokens that the generator's engine makes of a group for each prompt, with a swap at the start and
    then every second of the same processor time. As many wait in the engine as the generator's loop would hand it."""
    left = [(f"{group} {member}", prompt) for group, prompt in enumerate(prompts) for member in range(GROUP_SIZE)][::-1]
    tokens, swap_s = 0, 0.0
    while left or engine.num_running:
        if time.thread_time() > swap_s:
            engine.swap(engine.version + 1, weights)
            swap_s = time.thread_time() + SWAP_S
        while left and engine.num_running < RUNNING_GROUPS * GROUP_SIZE * 9 // 8:
            engine.add(*left.pop())
        tokens += sum(len(completion.tokens) for completion in engine.step())
    return tokens


def measure(_: bool) -> Iterator[Round]:
    settings = overrides(prepare_cold(), STEPS)
    core = min(os.sched_getaffinity(0))
    while True:
        ratios = alone(core, "in_turns", settings, BLOCKS)
        (theirs,) = alone(core, "of_llm", settings, NUM_REQUESTS)
        ours = inside_launch(settings)
        yield {
            "of LLM.generate": ours["tokens_per_s"] / theirs,
            "engine of LLM.generate": statistics.median(ratios),
            "tokens/s": ours["tokens_per_s"],
            "LLM.generate tokens/s": theirs,
            "stall ms": ours["stall_ms_mean"],
            "largest stall ms": ours["stall_ms_max"],
        }


ROW = Row(
    what="tokens/s of the generator inside asyncrl launch and of its engine alone, with a weight swap every second",
    against="vLLM's default LLM.generate with the same model, prompts, batch and lengths on the same core",
    limits={"of LLM.generate": Limit(0.97, never_above=1.2), "engine of LLM.generate": Limit(0.95, never_above=1.2)},
    measure=measure,
    long=True,
)

if __name__ == "__main__":
    from asyncrl.generator.vllm_backend.setup import CONDITIONS, DEFAULTS

    os.environ.update(DEFAULTS | CONDITIONS)
    measured = {"of_llm": of_llm, "in_turns": in_turns}[sys.argv[1]]
    settings = dict(parse_override(text) for text in sys.argv[3:])
    print(json.dumps(measured(load_config("demo", settings), int(sys.argv[2]))))
