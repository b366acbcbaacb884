"""TRL's GRPOTrainer on a workload of the demo: `python -m benchmarks.trl_side JSON`, with the fields of `Job`.

Model, data, batch, learning rate and schedule are those of the demo's config with the job's overrides. What else can be
set is what was fastest on two CPU cores (`benchmarks/README.md`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.frame import one_thread, output_of

TIMEOUT_S = 900.0

Step = dict[str, float]
"""The seconds from the first generation to the end of a step, the tokens trained in the step, and its reward."""


@dataclass(frozen=True, slots=True)
class Job:
    """A training by TRL."""

    overrides: list[str]
    """Overrides of the demo's config."""
    seed: int = 0
    stop_after: int = 0
    """Steps after which it ends before those of the config; 0 for all."""
    snapshots: str = ""
    """Folder for the policy of every `every` steps, as STEP/; empty for none."""
    every: int = 10
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Options of GRPOConfig in addition."""


def run(job: Job) -> list[Step]:
    """Trains in a separate process with a thread for each core, and returns the steps."""
    command = [sys.executable, "-m", "benchmarks.trl_side", json.dumps(asdict(job))]
    threads = str(len(os.sched_getaffinity(0)))
    environment = one_thread() | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return json.loads(output_of("TRL", command, environment=environment, timeout_s=TIMEOUT_S).splitlines()[-1])


def train(job: Job) -> list[Step]:
    import pyarrow.parquet as pq
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from asyncrl.config.load import load_config, parse_override

    config = load_config("demo", dict(parse_override(text) for text in job.overrides))
    size, groups, learner, model = (
        config.generator.group_size, config.replay.groups_per_step, config.learner, config.model.path,
    )  # fmt: skip
    steps: list[Step] = []
    drawn: list[Step] = []
    clock: dict[str, float] = {}

    def exact(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        rewards = [float(given.strip() == wanted) for given, wanted in zip(completions, answer, strict=True)]
        parts = len(rewards) // (size * groups)
        for part in range(parts):
            own = slice(part * size * groups, (part + 1) * size * groups)
            drawn.append({"tokens": float(sum(map(len, completion_ids[own]))), "reward": fmean(rewards[own])})
        return rewards

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock["began_s"], clock["began_cpu_s"] = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **__: Any) -> None:
            seconds = time.perf_counter() - clock["began_s"]
            steps.append(
                drawn[len(steps)] | {"seconds": seconds, "cpu_seconds": time.process_time() - clock["began_cpu_s"]}
            )
            if job.snapshots and len(steps) % job.every == 0:
                model.save_pretrained(Path(job.snapshots) / str(len(steps)))
            control.should_training_stop = len(steps) == job.stop_after

    rows = pq.read_table(config.data.train_files[0]).to_pylist()
    data = Dataset.from_list([{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in rows])
    adamw = learner.optimizer_options
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "output_dir": folder, "seed": job.seed, "use_cpu": not torch.cuda.is_available(), "bf16": False,
            "max_steps": config.steps, "num_generations": size, "per_device_train_batch_size": groups * size,
            "gradient_accumulation_steps": 1, "learning_rate": learner.lr, "warmup_steps": learner.warmup_steps,
            "lr_scheduler_type": learner.lr_schedule, "weight_decay": adamw.weight_decay,
            "adam_beta1": adamw.betas[0], "adam_beta2": adamw.betas[1], "max_grad_norm": learner.max_grad_norm,
            "max_completion_length": config.generator.max_new_tokens, "temperature": 1.0, "beta": 0.0,
            "report_to": [], "gradient_checkpointing": False, "save_strategy": "no", "logging_strategy": "no",
            "disable_tqdm": True, "dataloader_pin_memory": False,
        }  # fmt: skip
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=exact,
            args=GRPOConfig(**options | job.options),
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[Clock()],
        )
        trainer.train()
    return steps


if __name__ == "__main__":
    print("\n" + json.dumps(train(Job(**json.loads(sys.argv[1])))))
