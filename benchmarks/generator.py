"""Measures tokens/s of the generator inside `asyncrl launch` with a weight swap every second.

The model is the demo's before its warm start, with completions of 1 to 48 tokens. The run has a learning rate so small
that the lengths do not change, and a staleness limit so high that the generator never waits. Its weights are swapped at
every step, about once per second.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from benchmarks.demo import launched, prepare_cold, rows_of, summary_of
from benchmarks.frame import CannotRun, Limit, Round, Row, one_thread, output_of
from benchmarks.synchronous import all_prompts, make_llm, sampling

RUN = "bench-generator"
RUNNING_GROUPS = 32
GROUP_SIZE = 8
NUM_REQUESTS, QUICK_REQUESTS = 8192, 2048
STEPS, QUICK_STEPS = 20, 8
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


def bare(core: int, settings: list[str], requests: int) -> float:
    """Returns tokens/s of `LLM.generate` in a separate process on the core."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "benchmarks.generator", str(requests), *settings]
    environment = one_thread() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    printed = output_of("LLM.generate", command, environment=environment, timeout_s=TIMEOUT_S)
    return json.loads(printed.splitlines()[-1])


def bare_process(settings: list[str], requests: int) -> None:
    """Runs `LLM.generate` and prints its rate. The process that `bare` starts calls it."""
    from asyncrl.config import load_config, parse_override
    from asyncrl.generator.vllm_backend.setup import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    from vllm import TokensPrompt

    config = load_config("demo", dict(parse_override(text) for text in settings))
    llm, cut = make_llm(config), sampling(config)
    prompts = islice(all_prompts(config), requests // GROUP_SIZE)
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts for _ in range(GROUP_SIZE)]
    llm.generate(asked[:1000], cut, use_tqdm=False)
    started_s = time.perf_counter()
    outputs = llm.generate(asked, cut, use_tqdm=False)
    seconds = time.perf_counter() - started_s
    print(json.dumps(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds))


def measure(quick: bool) -> Iterator[Round]:
    settings = overrides(prepare_cold(), QUICK_STEPS if quick else STEPS)
    core = min(os.sched_getaffinity(0))
    while True:
        theirs = bare(core, settings, QUICK_REQUESTS if quick else NUM_REQUESTS)
        ours = inside_launch(settings)
        yield {
            "of LLM.generate": ours["tokens_per_s"] / theirs,
            "tokens/s": ours["tokens_per_s"],
            "LLM.generate tokens/s": theirs,
            "stall ms": ours["stall_ms_mean"],
            "largest stall ms": ours["stall_ms_max"],
        }


ROW = Row(
    what="tokens/s of the generator inside asyncrl launch, with weight swaps",
    against="LLM.generate with the same model, prompts, batch and lengths on the same core",
    limits={"of LLM.generate": Limit(0.97, bound=True)},
    measure=measure,
    long=True,
)

if __name__ == "__main__":
    bare_process(sys.argv[2:], int(sys.argv[1]))
