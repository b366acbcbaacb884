"""Measures goodput of the demo: trained tokens with signal over the tokens that the bare engine makes in that time.

A token has signal if the rewards of its group are not all equal, and counts if it was trained, according to the run's
trace. The bare engine is `LLM.generate` with the same model, prompts, batch and lengths on the generator's core, right
before and right after each launch. The time is from the first lease to the last step. The product's own estimate in
`summary.json` takes no part in it, and is compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count, islice
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.demo import OVERRIDES, launched, prepare, rows_of, summary_of
from benchmarks.frame import SEED, CannotRun, Limit, Round, Row
from benchmarks.worker import Worker, answer, instructions

RUN = "bench-goodput"
REQUESTS = 8192
TIMEOUT_S = 600.0
OWN = "difference to the run's own"


def with_signal(trace: Any) -> int:
    """Returns the tokens of the trained groups in a trace whose rewards are not all equal."""
    columns = (trace.column(name).to_pylist() for name in ("outcome", "rewards", "completion_tokens"))
    return sum(
        sum(tokens)
        for outcome, rewards, tokens in zip(*columns, strict=True)
        if outcome == "trained" and len(set(rewards)) > 1
    )


def measure(_: bool) -> Iterator[Round]:
    from asyncrl.observe.trace import read_trace

    prepare()
    with ExitStack() as stack:
        bare = Worker("benchmarks.goodput", *OVERRIDES, cores=[min(os.sched_getaffinity(0))], stack=stack)

        def bare_rate() -> float:
            bare.tell(REQUESTS)
            return bare.answer()

        bare_rate()  # the first steps are slower
        before = bare_rate()
        for seed in count():
            with launched(RUN, [f"seed={seed}"]) as process:
                if process.wait(TIMEOUT_S):
                    raise CannotRun(f"asyncrl launch ended with code {process.returncode}; see runs/{RUN}/logs")
            seconds, summary = rows_of(RUN)[-1]["time/elapsed_s"], summary_of(RUN)
            signal, trained = with_signal(read_trace(Path("runs") / RUN)), summary["tokens_trained"]
            after = bare_rate()
            bare_per_s, before = mean((before, after)), after
            goodput = signal / (bare_per_s * seconds)
            yield {
                "goodput": goodput,
                "trained with signal of trained": signal / trained,
                "trained of generated": trained / summary["tokens_generated"],
                "generated of bare": summary["tokens_generated"] / (bare_per_s * seconds),
                "tokens/s with signal": signal / seconds,
                "LLM.generate tokens/s": bare_per_s,
                OWN: abs(goodput - summary["goodput"]["total"]),
                SEED: seed,
            }


def bare_process(overrides: list[str]) -> None:
    """Measures `LLM.generate` whenever it is asked to: the tokens/s of this many requests."""
    from asyncrl.config.load import load_config, parse_override
    from asyncrl.generator.vllm_backend.setup import CONDITIONS, DEFAULTS

    os.environ.update(DEFAULTS | CONDITIONS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    from vllm import TokensPrompt

    from benchmarks.synchronous import all_prompts, make_llm, sampling

    config = load_config("demo", dict(parse_override(text) for text in overrides))
    llm, cut, size = make_llm(config), sampling(config), config.generator.group_size
    for requests in instructions():
        prompts = islice(all_prompts(config), requests // size)
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts for _ in range(size)]
        started_s = time.perf_counter()
        outputs = llm.generate(asked, cut, use_tqdm=False)
        seconds = time.perf_counter() - started_s
        answer(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds)


ROW = Row(
    what="trained tokens with signal of the demo",
    against="the tokens of LLM.generate on the generator's core in the same time",
    limits={"goodput": Limit(0.6, never_above=1.0), OWN: Limit(0.05, at_most=True)},
    measure=measure,
    rounds=3,
    long=True,
)

if __name__ == "__main__":
    import sys

    bare_process(sys.argv[1:])
