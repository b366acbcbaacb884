"""Policies that a training saved with its clock, and what they are worth: their mean reward on rows of a file.

A training reward is no measure across trainers: with refunds or a selection of prompts it is that of harder prompts. So
every side saves its policy every few steps, and afterwards the same scorer samples answers of each to all rows, with
transformers, at a temperature of 1 and with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.demo import rows_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EVERY_STEPS = 10
SAMPLES, QUICK_SAMPLES = 16, 2
"""Answers to each row."""
HELD = 2
"""Consecutive snapshots that must have a reward before it counts as reached."""

Reward = Callable[[str, str], float]
"""Maps the text of an answer and the ground truth to a reward."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The policy after a step."""

    step: int
    seconds: float
    """From the first generation to the end of the step."""
    tokens: float
    """Generated until then, also those that were not trained."""
    folder: Path


@dataclass(frozen=True, slots=True)
class Point:
    """What a policy has cost, and its reward."""

    seconds: float
    tokens: float
    reward: float
    step: float = 0.0


def overrides(every: int = EVERY_STEPS) -> list[str]:
    """Returns overrides of a launch that saves the policy of every `every` steps and keeps all of them."""
    return [f"checkpoint.every_steps={every}", "checkpoint.keep_last=1000", "checkpoint.keep_best=false"]


def of_run(run: str) -> list[Snapshot]:
    """Returns the snapshots in the checkpoints of a launch."""
    folder = Path("runs") / run / "checkpoints"
    found = [
        Snapshot(row["step"], row["time/elapsed_s"], row["generator/tokens"], folder / f"step-{row['step']:06d}/model")
        for row in rows_of(run)
    ]
    return [snapshot for snapshot in found if (snapshot.folder / "config.json").exists()]


class Scorer:
    """Computes the mean reward of policies on all rows of a file in verl's schema."""

    def __init__(self, file: Path, tokenizer: str, reward: Reward, *, max_new_tokens: int, samples: int) -> None:
        import pyarrow.parquet as pq
        from transformers import AutoTokenizer

        rows = pq.read_table(file).to_pylist()
        self._truths = [row["reward_model"]["ground_truth"] for row in rows for _ in range(samples)]
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tokenizer, padding_side="left")
        prompts = [row["prompt"] for row in rows for _ in range(samples)]
        self._prompts = self._tokenizer(prompts, return_tensors="pt", padding=True)
        self._reward, self._max_new_tokens = reward, max_new_tokens

    def score(self, folder: Path) -> float:
        """Returns the mean reward of the policy in the folder."""
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

    def points(self, snapshots: Sequence[Snapshot]) -> Iterator[Point]:
        """Scores the snapshots in this order, each when it is asked for."""
        for one in snapshots:
            yield Point(one.seconds, one.tokens, self.score(one.folder), one.step)


def reach(points: Iterator[Point] | Sequence[Point], reward: float) -> Point | None:
    """Returns when the reward was reached, between two points by linear interpolation; None if it was not. It must hold
    for HELD points, or up to the last one. Takes no further points than that needs."""
    before: Point | None = None
    first: tuple[Point | None, Point] | None = None
    held = 0
    for point in points:
        held = held + 1 if point.reward >= reward else 0
        if held == 1:
            first = before, point
        if held == HELD:
            break
        before = point
    if not held or first is None:
        return None
    low, high = first
    return high if low is None else _between(low, high, (reward - low.reward) / (high.reward - low.reward))


def _between(low: Point, high: Point, share: float) -> Point:
    values = (
        (1 - share) * getattr(low, name) + share * getattr(high, name)
        for name in ("seconds", "tokens", "reward", "step")
    )
    return Point(*values)
