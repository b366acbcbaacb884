"""Measures what to do with groups without signal: seconds to a reward by `replay.zero_variance`, on three workloads.

demo: the generator is the bottleneck. learner-bound: the demo with so many passes over each batch that the learner is.
long-tailed: the demo with a model that puts a long-tailed number of spaces before its answers. The policies of every
run, which lasts equally long, are scored on all rows by one scorer (`snapshots.py`). Runs of a seed follow each other
directly, so that a machine that changes does so for all choices.

    python -m benchmarks.no_signal                        # 27 runs, half an hour
    python -m benchmarks.no_signal demo --seeds 5 replay.max_staleness=2
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.demo import DATA, MODEL, prepare, train_for
from benchmarks.results import number
from benchmarks.snapshots import Point, Scorer, of_run, overrides, reach

RUN = "bench-no-signal"
CHOICES = ("refund", "train", "drop")
LONG_MODEL = Path("demo/spaces-model")
MEDIAN_SPACES, SIGMA, MOST_SPACES = 4.0, 1.0, 50
"""Spaces before an answer: log-normal, cut."""
ANSWER_TOKENS = 3
MAKE_STEPS, MAKE_BATCH, MAKE_LR = 200, 64, 1e-3
SECONDS, SEEDS = 40.0, 3


@dataclass(frozen=True, slots=True)
class Workload:
    """A variant of the demo."""

    overrides: tuple[str, ...]
    reward: float
    """The reward to reach."""
    max_new_tokens: int = 6
    samples: int = 16
    """Answers to each row that a score is the mean of."""


WORKLOADS = {
    "demo": Workload((), 0.85),
    "learner-bound": Workload(("learner.epochs=6",), 0.85),
    "long-tailed": Workload(
        (
            f"model.path={LONG_MODEL}", "recipe=null", f"generator.max_new_tokens={MOST_SPACES + ANSWER_TOKENS}",
            "replay.groups_per_step=16",
        ),
        0.6, MOST_SPACES + ANSWER_TOKENS, 4,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}, and section.key=value for all runs")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each run")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    arguments = parser.parse_args()
    settings = [text for text in arguments.workloads if "=" in text]
    names = [text for text in arguments.workloads if "=" not in text] or list(WORKLOADS)
    if unknown := set(names) - set(WORKLOADS):
        parser.error(f"no workload is called {', '.join(sorted(unknown))}; they are {', '.join(WORKLOADS)}")
    prepare()
    found: dict[tuple[str, str], list[tuple[Point | None, float]]] = {}
    for name in names:
        for seed in range(arguments.seeds):
            for choice in CHOICES:
                one = train(name, choice, seed, arguments.seconds, settings)
                found.setdefault((name, choice), []).append(one)
                print(f"{name}, {choice}, seed {seed}: {in_words(*one)}", flush=True)
    print("\n".join(table(found, arguments.seconds)))


def train(name: str, choice: str, seed: int, seconds: float, settings: list[str]) -> tuple[Point | None, float]:
    """Runs a training. Returns when it reached the reward of its workload, and its last reward."""
    from asyncrl.rewards.builtin.text import exact

    workload = WORKLOADS[name]
    if name == "long-tailed" and not LONG_MODEL.exists():
        make_long_model()
    options = [*workload.overrides, f"replay.zero_variance={choice}", f"seed={seed}", *overrides(), *settings]
    train_for(RUN, seconds, options)
    tokens, samples = workload.max_new_tokens, workload.samples
    points = list(Scorer(DATA, str(MODEL), exact, max_new_tokens=tokens, samples=samples).points(of_run(RUN)))
    return reach(points, workload.reward), points[-1].reward if points else float("nan")


def in_words(point: Point | None, last: float) -> str:
    reached = f"reached after {point.seconds:.1f} s and {point.step:.0f} steps" if point else "not reached"
    return f"{reached}, {last:.3f} at the end"


def table(found: dict[tuple[str, str], list[tuple[Point | None, float]]], seconds: float) -> list[str]:
    """Returns the lines of a Markdown table with medians and least to largest over the seeds."""
    end = f"reward after {seconds:g} s"
    lines = [f"| workload | groups without signal | reward | seconds to it | tokens to it | {end} |", "|---" * 6 + "|"]
    for (name, choice), runs in found.items():
        cells = [
            _spread([getattr(point, what) if point else float("inf") for point, _ in runs])
            for what in ("seconds", "tokens")
        ]
        reward = f"{WORKLOADS[name].reward:g}"
        lines.append(f"| {name} | {choice} | {reward} | {' | '.join(cells)} | {_spread([last for _, last in runs])} |")
    return lines


def _spread(values: list[float]) -> str:
    """Returns median, least and largest; those that were not reached are infinite."""
    middle, least, largest = (
        "not reached" if value == float("inf") else number(value)
        for value in (median(values), min(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({least} to {largest})"


def make_long_model() -> None:
    """Trains the demo's model to put spaces before its answers; which answer it prefers stays as it is."""
    import numpy as np
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from asyncrl.data.demo import sums
    from asyncrl.data.tiny_model import RIGHT_SHARE

    torch.manual_seed(0)
    random = np.random.default_rng(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=MAKE_LR, weight_decay=0.0)
    rows = sums()
    for step in range(MAKE_STEPS):
        optimizer.param_groups[0]["lr"] = MAKE_LR * (1 - 0.9 * step / MAKE_STEPS)
        texts = []
        for index in random.integers(len(rows), size=MAKE_BATCH):
            prompt, answer, a, b = rows[index]
            given = random.choice([answer, f"{a:02d}", f"{b:02d}"], p=[RIGHT_SHARE, *[(1 - RIGHT_SHARE) / 2] * 2])
            spaces = min(int(random.lognormal(np.log(MEDIAN_SPACES), SIGMA)), MOST_SPACES)
            texts.append(f"{prompt}{' ' * spaces}{given}<eos>")
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, : len(rows[0][0])] = -100
        logits = model(**batch).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(LONG_MODEL)
    tokenizer.save_pretrained(LONG_MODEL)


if __name__ == "__main__":
    main()
