"""Trains two workloads in `asyncrl launch` and in TRL's GRPOTrainer, on both cores each.

demo: seconds and generated tokens until the policy has a reward of 0.85 on all prompts. Model, data, group size, batch,
learning rate and schedule are the same; what happens to groups with equal rewards is each side's own: TRL trains them.
A training reward is no measure across trainers: with refunds it is the reward of harder prompts. So every side saves
its policy every few steps with its clock, and one scorer samples answers of each to all rows.

long-tailed: trained tokens/s with the lengths of `long_tail.py`; rewards are artificial, and both sides train every
group.

Start-up does not count: the clocks start with the first generation. Round n has seed n on both sides.
`python -m benchmarks.end_to_end JSON` is the process of TRL, with the fields of `Job`; its settings are the fastest on
two CPU cores (`benchmarks/README.md`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import demo
from benchmarks.demo import DATA, launched, prepare, rows_of
from benchmarks.frame import SEED, CannotRun, Limit, Round, Row, one_thread, output_of
from benchmarks.long_tail import prepare_long_tail, settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RUN = "bench-end-to-end"
REWARD = 0.85
STEPS = 300
"""Steps of the demo. The learning rate falls to 0 with the last one."""
LONG_STEPS, LONG_WARM_STEPS = 12, 3
"""Steps of the long-tailed workload that count, and those before them."""
EVERY_STEPS = 10
"""Steps between two saved policies."""
SAMPLES = 16
"""Answers to each row that a policy is scored by."""
HELD = 2
"""Consecutive policies that must have the reward before it counts as reached."""
TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Job:
    """A training by TRL."""

    overrides: list[str]
    """Overrides of the demo's config."""
    seed: int
    steps: int
    snapshots: str = ""
    """Folder for the policy of every EVERY_STEPS steps, as STEP/; empty for none."""


@dataclass(frozen=True, slots=True)
class Point:
    """The cost of a training after a step: seconds from the first generation, and generated tokens, of which some may
    not have been trained. `reward` is the policy's."""

    step: float
    seconds: float
    tokens: float
    reward: float = 0.0


def measure(_: bool) -> Iterator[Round]:
    from asyncrl.rewards.builtin import exact

    if importlib.util.find_spec("trl") is None:
        raise CannotRun("TRL is not installed: pip install -e .[bench]")
    model, long_model = prepare(), prepare_long_tail()
    scorer = Scorer(DATA, model, exact, max_new_tokens=6)
    for seed in count():
        yield to_reward(seed, scorer) | long_tailed(long_model, seed) | {SEED: seed}


def to_reward(seed: int, scorer: Scorer) -> Round:
    """Returns the figures of the demo."""
    saving = [f"checkpoint.every_steps={EVERY_STEPS}", "checkpoint.keep_last=1000", "checkpoint.keep_best=false"]
    points = launch([f"seed={seed}", *saving], STEPS)
    ours = scorer.reach(points, lambda step: Path("runs") / RUN / f"checkpoints/step-{step:06d}/model")
    with tempfile.TemporaryDirectory() as folder:
        points = train_with_trl(Job([f"steps={STEPS}", *demo.OVERRIDES], seed, STEPS, folder))
        theirs = scorer.reach(points, lambda step: Path(folder) / str(step))
    if ours is None or theirs is None:
        side = "asyncrl launch" if ours is None else "TRL"
        raise CannotRun(f"{side} did not reach a reward of {REWARD} in {STEPS} steps")
    return {
        "seconds of TRL, demo": ours.seconds / theirs.seconds,
        "generated tokens of TRL, demo": ours.tokens / theirs.tokens,
        "seconds to reward": ours.seconds,
        "TRL seconds to reward": theirs.seconds,
        "steps to reward": ours.step,
        "TRL steps to reward": theirs.step,
    }


def long_tailed(model: str, seed: int) -> Round:
    """Returns the figures of the long-tailed workload, with the demo's staleness limit."""
    from asyncrl.config.load import load_config

    steps = LONG_WARM_STEPS + LONG_STEPS
    limit = load_config("demo").replay.max_staleness
    # The last steps train the contents of the queue after generation has ended.
    options = [*settings(model, steps=steps + limit, max_staleness=limit), f"seed={seed}"]
    ours = trained_per_s(launch(options, steps + limit, count="learner/tokens"), steps)
    theirs = trained_per_s(train_with_trl(Job([*options, *demo.OVERRIDES], seed, steps)), steps)
    return {"tokens/s of TRL, long-tailed": ours / theirs, "tokens/s": ours, "TRL tokens/s": theirs}


def trained_per_s(points: list[Point], steps: int) -> float:
    """Returns the tokens/s from the last warm-up step to `steps`."""
    first, last = points[LONG_WARM_STEPS - 1], points[steps - 1]
    return (last.tokens - first.tokens) / (last.seconds - first.seconds)


def launch(options: list[str], steps: int, *, count: str = "generator/tokens") -> list[Point]:
    """Runs `asyncrl launch` for `steps` steps, and returns a point for each, with the generated or trained tokens."""
    with launched(RUN, [*options, f"steps={steps}"]) as process:
        if process.wait(TIMEOUT_S):
            raise CannotRun(f"asyncrl launch ended with code {process.returncode}; see runs/{RUN}/logs")
    points, tokens = list[Point](), 0.0
    for row in rows_of(RUN):
        tokens = row[count] if count == "generator/tokens" else tokens + row[count]
        points.append(Point(row["step"], row["time/elapsed_s"], tokens))
    return points


class Scorer:
    """Computes the mean reward of policies on all rows of a file in verl's schema."""

    def __init__(
        self,
        file: Path,
        tokenizer: str,
        reward: Callable[[str, str], float],
        *,
        max_new_tokens: int,
        samples: int = SAMPLES,
    ) -> None:
        """`reward` maps the text of an answer and the ground truth to its reward."""
        import pyarrow.parquet as pq
        from transformers import AutoTokenizer

        rows = pq.read_table(file).to_pylist()
        self._truths = [row["reward_model"]["ground_truth"] for row in rows for _ in range(samples)]
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tokenizer, padding_side="left")
        prompts = [row["prompt"] for row in rows for _ in range(samples)]
        self._prompts = self._tokenizer(prompts, return_tensors="pt", padding=True)
        self._reward, self._max_new_tokens = reward, max_new_tokens

    def reach(self, points: Iterable[Point], folder_of: Callable[[int], Path]) -> Point | None:
        """Returns when a training reached REWARD, by the policies that it saved (`folder_of(step)`); None if never."""
        saved = ((point, folder_of(int(point.step))) for point in points)
        return reached(
            Point(point.step, point.seconds, point.tokens, self.score(folder))
            for point, folder in saved
            if (folder / "config.json").exists()
        )

    def score(self, folder: Path) -> float:
        """Returns the mean reward of the policy in the folder, sampled by transformers at a temperature of 1."""
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        policy: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        torch.manual_seed(0)
        sampling = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=self._max_new_tokens,
            eos_token_id=self._tokenizer.eos_token_id, pad_token_id=self._tokenizer.pad_token_id,
        )  # fmt: skip
        with torch.no_grad():
            tokens = policy.generate(
                input_ids=self._prompts["input_ids"],
                attention_mask=self._prompts["attention_mask"],
                generation_config=sampling,
            )
        answers = tokens[:, self._prompts["input_ids"].shape[1] :]
        texts = self._tokenizer.batch_decode(answers, skip_special_tokens=True)
        return sum(map(self._reward, texts, self._truths)) / len(texts)


def reached(points: Iterable[Point], reward: float = REWARD) -> Point | None:
    """Returns when the reward was reached, between two points by linear interpolation; None if it was not. It must hold
    for HELD points, or up to the last one. Takes no further points than that needs."""
    before = low = high = None
    held = 0
    for point in points:
        held = held + 1 if point.reward >= reward else 0
        if held == 1:
            low, high = before, point
        if held == HELD:
            break
        before = point
    if not held or high is None or low is None:
        return high if held else None
    share = (reward - low.reward) / (high.reward - low.reward)
    names = "step", "seconds", "tokens", "reward"
    return Point(*((1 - share) * getattr(low, name) + share * getattr(high, name) for name in names))


def train_with_trl(job: Job) -> list[Point]:
    """Trains by TRL in a separate process with a thread for each core, and returns a point for each step."""
    command = [sys.executable, "-m", "benchmarks.end_to_end", json.dumps(asdict(job))]
    threads = str(len(os.sched_getaffinity(0)))
    environment = one_thread() | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    printed = output_of("TRL", command, environment=environment, timeout_s=TIMEOUT_S)
    return [Point(*values) for values in json.loads(printed.splitlines()[-1])]


def trl(job: Job) -> list[tuple[int, float, int]]:
    """Runs the job in this process. Returns step, seconds and tokens of each step."""
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
    steps: list[tuple[int, float, int]] = []
    batch_tokens: list[int] = []
    began_s = 0.0

    def exact(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        lengths = [len(tokens) for tokens in completion_ids]
        batch_tokens.extend(sum(lengths[at : at + size * groups]) for at in range(0, len(lengths), size * groups))
        return [float(text.strip() == truth) for text, truth in zip(completions, answer, strict=True)]

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            nonlocal began_s
            began_s = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **__: Any) -> None:
            step = len(steps) + 1
            steps.append((step, time.perf_counter() - began_s, sum(batch_tokens[:step])))
            if job.snapshots and step % EVERY_STEPS == 0:
                model.save_pretrained(Path(job.snapshots) / str(step))
            control.should_training_stop = step == job.steps

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
            args=GRPOConfig(**options),
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[Clock()],
        )
        trainer.train()
    return steps


ROW = Row(
    what=f"seconds and tokens to a reward of {REWARD} on the demo; trained tokens/s with long-tailed lengths",
    against="TRL's GRPOTrainer with the same model, data, batch and learning rate on both cores",
    limits={"seconds of TRL, demo": Limit(0.6, at_most=True), "tokens/s of TRL, long-tailed": Limit(3.0)},
    measure=measure,
    timeout_s=5400.0,
    rounds=3,
    long=True,
)

if __name__ == "__main__":
    print("\n" + json.dumps(trl(Job(**json.loads(sys.argv[1])))))
