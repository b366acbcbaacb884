"""Trains the demo to a reward of 0.85, in `asyncrl launch` and in TRL's GRPOTrainer.

Model, data, group size, batch, learning rate and schedule are the same; groups with equal rewards are trained, as in
TRL. TRL generates with transformers, with one thread per core. Start-up does not count: the clocks start with the first
generation.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.demo import DATA, launched, prepare, rows_of
from benchmarks.frame import CannotRun, Limit, Round, Row, one_thread, output_of

RUN = "bench-end-to-end"
REWARD, SMOOTHED_STEPS = 0.85, 5
"""The reward to reach, and the number of steps over which it is averaged."""
STEPS, QUICK_STEPS = 300, 6
WARM_STEPS = 1
"""Number of first steps that the rate excludes."""
TIMEOUT_S = 900.0

Step = dict[str, float]
"""The seconds from the first generation to the end of a step, the tokens trained in the step, and its reward."""


def ours(quick: bool) -> list[Step]:
    shutil.rmtree(Path("runs") / RUN, ignore_errors=True)
    # A quick run is stopped early instead of configured with fewer steps, so that the learning rate has the same
    # schedule.
    with launched(RUN, [f"steps={STEPS}", "replay.zero_variance=train"]) as process:
        until_s = time.monotonic() + TIMEOUT_S
        while len(steps := our_steps()) < STEPS and not enough(steps, quick):
            if process.poll() or time.monotonic() > until_s:
                raise CannotRun(f"asyncrl launch did not reach the reward; see runs/{RUN}/logs")
            time.sleep(0.2)
    return steps


def our_steps() -> list[Step]:
    if not (Path("runs") / RUN / "metrics.jsonl").exists():
        return []
    names = {"seconds": "time/elapsed_s", "tokens": "learner/tokens", "reward": "reward/mean"}
    return [{name: row[metric] for name, metric in names.items()} for row in rows_of(RUN)]


def enough(steps: list[Step], quick: bool) -> bool:
    return len(steps) >= QUICK_STEPS if quick else seconds_to_reward(steps) is not None


def trl(model: str, quick: bool) -> list[Step]:
    """Returns the steps of TRL, which runs in a separate process."""
    command = [sys.executable, "-m", "benchmarks.end_to_end", model, *["quick"] * quick]
    threads = str(len(os.sched_getaffinity(0)))
    environment = one_thread() | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return json.loads(output_of("TRL", command, environment=environment, timeout_s=TIMEOUT_S).splitlines()[-1])


def trl_process(model: str, quick: bool) -> None:
    """Runs TRL's training and prints its steps. The process that `trl` starts calls it."""
    import pyarrow.parquet as pq
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from asyncrl.config import load_config

    config = load_config("demo")
    size, groups, learner = config.generator.group_size, config.replay.groups_per_step, config.learner
    steps: list[Step] = []
    clock: dict[str, float] = {}

    def exact(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        rewards = [float(given.strip() == wanted) for given, wanted in zip(completions, answer, strict=True)]
        steps.append({"seconds": 0.0, "tokens": sum(map(len, completion_ids)), "reward": fmean(rewards)})
        return rewards

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock["began_s"] = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
            steps[-1]["seconds"] = time.perf_counter() - clock["began_s"]
            control.should_training_stop = enough(steps, quick)

    rows = pq.read_table(DATA).to_pylist()
    data = Dataset.from_list([{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in rows])
    adamw = learner.optimizer_options
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, use_cpu=not torch.cuda.is_available(), bf16=False, max_steps=STEPS, num_generations=size,
            per_device_train_batch_size=groups * size, gradient_accumulation_steps=1, learning_rate=learner.lr,
            warmup_steps=learner.warmup_steps, lr_scheduler_type="linear", weight_decay=adamw.weight_decay,
            adam_beta1=adamw.betas[0], adam_beta2=adamw.betas[1], max_grad_norm=learner.max_grad_norm,
            max_completion_length=config.generator.max_new_tokens, temperature=1.0, beta=0.0, report_to=[],
            gradient_checkpointing=False, save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=exact,
            args=settings,
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[Clock()],
        )
        trainer.train()
    print("\n" + json.dumps(steps))


def seconds_to_reward(steps: list[Step]) -> float | None:
    """Returns the time at which the mean of the latest rewards first reached REWARD; None if it did not."""
    for end in range(SMOOTHED_STEPS, len(steps) + 1):
        if fmean(step["reward"] for step in steps[end - SMOOTHED_STEPS : end]) >= REWARD:
            return steps[end - 1]["seconds"]
    return None


def tokens_per_s(steps: list[Step]) -> float:
    seconds = steps[-1]["seconds"] - steps[WARM_STEPS - 1]["seconds"]
    return sum(step["tokens"] for step in steps[WARM_STEPS:]) / seconds


def measure(quick: bool) -> Iterator[Round]:
    if importlib.util.find_spec("trl") is None:
        raise CannotRun("TRL is not installed: pip install -e .[bench]")
    model = prepare()
    while True:
        theirs, own = trl(model, quick), ours(quick)
        figures = {"tokens/s of TRL": tokens_per_s(own) / tokens_per_s(theirs)}
        if not quick:
            figures |= to_reward(own, theirs)
        yield figures | {"tokens/s": tokens_per_s(own), "TRL tokens/s": tokens_per_s(theirs)}


def to_reward(own: list[Step], theirs: list[Step]) -> Round:
    own_s, their_s = seconds_to_reward(own), seconds_to_reward(theirs)
    if own_s is None:
        raise CannotRun(f"asyncrl launch did not reach a reward of {REWARD} after {STEPS} steps")
    # If TRL does not reach the reward, the time of its last step is a lower bound.
    return {
        "seconds of TRL": own_s / (their_s or theirs[-1]["seconds"]),
        "seconds to reward": own_s,
        "TRL seconds to reward": their_s or theirs[-1]["seconds"],
        "steps": len(own),
        "TRL steps": len(theirs),
    }


ROW = Row(
    what=f"trained tokens/s, and seconds to a reward of {REWARD}, on the demo",
    against="TRL's GRPOTrainer with the same model, data, batch and learning rate on both cores",
    limits={"tokens/s of TRL": Limit(2.0), "seconds of TRL": Limit(1.0, at_most=True)},
    measure=measure,
    timeout_s=3600.0,
    long=True,
)

if __name__ == "__main__":
    trl_process(sys.argv[1], "quick" in sys.argv[2:])
