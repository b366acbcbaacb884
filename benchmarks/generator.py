"""Measures tokens/s of the generator inside `asyncrl launch` against vLLM's default `LLM.generate` in a process of its
own on the same core.

The model is the demo's before its warm start, with completions of 1 to 48 tokens. The run has a learning rate so small
that the lengths do not change, and a staleness limit so high that the generator never waits. Its weights are swapped at
every step, about once per second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.demo import OVERRIDES, launched, prepare_cold, rows_of, summary_of
from benchmarks.frame import CannotRun, Limit, Round, Row
from benchmarks.worker import Worker

RUN = "bench-generator"
REQUESTS, WARM_REQUESTS = 8192, 1000
STEPS = 20
TIMEOUT_S = 400.0


def overrides(model: str) -> list[str]:
    return [
        f"model.path={model}", f"steps={STEPS}", "learner.lr=1e-12", "replay.max_staleness=1000",
        "replay.zero_variance=train", "replay.groups_per_step=64", "generator.max_new_tokens=48",
        "generator.max_running_groups=32", "generator.group_size=8",
    ]  # fmt: skip


def inside_launch(settings: list[str]) -> dict[str, float]:
    """Returns tokens/s of generator 0 while busy, from the middle of the run, and its swap stalls. The launcher assigns
    the first cores to generators."""
    with launched(RUN, settings) as process:
        if process.wait(TIMEOUT_S):
            raise CannotRun(f"asyncrl launch ended with code {process.returncode}; see runs/{RUN}/logs")
    rows = rows_of(RUN)
    first, last = rows[len(rows) // 5], rows[-1]
    tokens, busy_s = (last[name] - first[name] for name in ("generator/tokens", "generator/busy_s"))
    return {"tokens_per_s": tokens / busy_s, **summary_of(RUN)["weight_sync"]}


def measure(_: bool) -> Iterator[Round]:
    settings = overrides(prepare_cold())
    with ExitStack() as stack:
        core = min(os.sched_getaffinity(0))
        bare = Worker("benchmarks.goodput", *settings, *OVERRIDES, cores=[core], stack=stack)
        bare.tell(WARM_REQUESTS)
        bare.answer()
        while True:
            bare.tell(REQUESTS)
            theirs, ours = bare.answer(), inside_launch(settings)
            yield {
                "of LLM.generate": ours["tokens_per_s"] / theirs,
                "tokens/s": ours["tokens_per_s"],
                "LLM.generate tokens/s": theirs,
                "stall ms": ours["stall_ms_mean"],
                "largest stall ms": ours["stall_ms_max"],
            }


ROW = Row(
    what="tokens/s of the generator inside asyncrl launch, with a weight swap every second",
    against="vLLM's default LLM.generate with the same model, prompts, batch and lengths on the same core",
    limits={"of LLM.generate": Limit(0.97, never_above=1.2)},
    measure=measure,
    long=True,
)
