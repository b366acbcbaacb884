"""The code of a reward worker: a process with the user's functions and a tokenizer, without torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl.config import Options, Rewards
from asyncrl.errors import ConfigError
from asyncrl.rewards import reward_model
from asyncrl.rewards.calling import CompletedGroup, Message, Score
from asyncrl.rewards.table import RewardTable
from asyncrl.util.processes import become_helper
from asyncrl.util.redaction import redact
from asyncrl.util.tokenizer import Decoder, load_decoder
from asyncrl.wire.endpoints import Endpoints

_TIME_SHARE = 0.9
"""Fraction of the time limit that functions see as theirs; the rest is for returning the scores."""


class PackedGroup(NamedTuple):
    """A group as it is sent to a worker."""

    completion_ids: list[list[int]]
    """Action tokens of each completion."""
    statuses: list[str]
    prompt: bytes
    """Tokens as int32."""
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any]
    chat: list[Message] | None
    columns: dict[str, Any]
    evaluation: bool = False
    """True if it is scored by the rewards of evaluations."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The settings of a worker."""

    rewards: Rewards
    options: dict[str, Options]
    eval_rewards: Rewards
    """The rewards of evaluations, which may be the same."""
    eval_options: dict[str, Options]
    ground_truth_name: str
    tokenizer_path: str
    trust_remote_code: bool
    max_new_tokens: int
    timeout_s: float
    endpoints: Endpoints | None


_Scorer = Callable[[PackedGroup], list[Score]]
_scorer: _Scorer | None = None


def start_worker(parent: int, spec: WorkerSpec) -> None:
    """Makes this process a reward worker: it ends with `parent`, uses one thread, and loads the functions.

    Never raises: when a function cannot be loaded, every group gets that error.
    """
    global _scorer
    become_helper(parent)
    try:
        decode = load_decoder(spec.tokenizer_path, trust_remote_code=spec.trust_remote_code)
        reward_model.connect(spec.endpoints)
        _scorer = _make_scorer(spec, decode)
    except ConfigError as error:
        message = redact(str(error))
        _scorer = lambda group: [(0.0, {}, message)] * len(group.completion_ids)  # noqa: E731


def score_groups(groups: list[PackedGroup]) -> tuple[float, list[list[Score]]]:
    """Scores the groups; returns the seconds spent and the scores of every group."""
    assert _scorer is not None  # start_worker ran in this process
    started = time.perf_counter()
    scores = [_scorer(group) for group in groups]
    return time.perf_counter() - started, scores


def _make_scorer(spec: WorkerSpec, decode: Decoder) -> _Scorer:
    training = evaluation = RewardTable(spec.rewards, spec.options)
    if (spec.eval_rewards, spec.eval_options) != (spec.rewards, spec.options):
        evaluation = RewardTable(spec.eval_rewards, spec.eval_options)

    def score(packed: PackedGroup) -> list[Score]:
        deadline_s = time.monotonic() + _TIME_SHARE * spec.timeout_s
        prompt_text, *completions = decode([memoryview(packed.prompt).cast("i").tolist(), *packed.completion_ids])
        return (evaluation if packed.evaluation else training)(
            CompletedGroup(
                prompt=prompt_text,
                completions=completions,
                completion_ids=packed.completion_ids,
                ground_truth=packed.ground_truth,
                data_source=packed.data_source,
                extra_info=packed.extra_info,
                ground_truth_name=spec.ground_truth_name,
                chat=packed.chat,
                columns=packed.columns,
                statuses=packed.statuses,
                max_new_tokens=spec.max_new_tokens,
                deadline_s=deadline_s,
            )
        )

    return score
