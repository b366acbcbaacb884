"""The code of a reward worker: a process with the user's functions and a tokenizer, without torch and numpy."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.rewards import reward_model
from asyncrl.rewards.calling import TURN_BREAK, CompletedGroup, Message, Score
from asyncrl.rewards.table import RewardTable, evaluation_config
from asyncrl.util.model_files import Decoder, load_decoder
from asyncrl.util.processes import become_helper
from asyncrl.util.text import redact
from asyncrl.wire.endpoints import Endpoints

TIME_SHARE = 0.9
"""Fraction of the time limit that functions see as theirs; the rest is for returning the scores."""


class PackedEpisode(NamedTuple):
    """The part of an episode in addition to a completion, as it is sent to a worker."""

    turn_tokens: list[int]
    """Number of tokens of each turn of the policy."""
    messages: bytes
    """As JSON; empty for an episode of plain text."""
    reward: float
    """That of the environment, as `parts`."""
    parts: dict[str, float]
    error: str
    """Why the environment gave no reward; empty if it did."""


class PackedGroup(NamedTuple):
    """A group as it is sent to a worker."""

    completion_ids: list[list[int]]
    """Action tokens of each completion."""
    statuses: list[str]
    """ "completed" or "truncated", of each completion."""
    prompt: bytes
    """Tokens as int32."""
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any]
    chat: list[Message] | None
    columns: dict[str, Any]
    text: str = ""
    """The prompt as the row has it; empty for a chat."""
    evaluation: bool = False
    """True if it is scored by the rewards of evaluations."""
    episodes: Sequence[PackedEpisode] = ()
    """One for each completion; none without an environment."""

    def select(self, members: Sequence[int]) -> PackedGroup:
        """The group with these completions only."""
        return self._replace(
            completion_ids=[self.completion_ids[index] for index in members],
            statuses=[self.statuses[index] for index in members],
            episodes=[self.episodes[index] for index in members] if self.episodes else (),
        )


Scorer = Callable[[PackedGroup], list[Score]]
_scorer: Scorer | None = None


def start_worker(parent: int, config: Config, tokenizer_path: str, endpoints: Endpoints | None) -> None:
    """Makes this process a reward worker: it ends with `parent`, uses one thread, and loads the functions.

    Never raises: when a function cannot be loaded, every group gets that error.
    """
    global _scorer
    become_helper(parent)
    try:
        decode = load_decoder(tokenizer_path, trust_remote_code=config.model.trust_remote_code)
        reward_model.connect(endpoints)
        _scorer = _make_scorer(config, decode)
    except ConfigError as error:
        message = redact(str(error))
        _scorer = lambda group: [(0.0, {}, message)] * len(group.completion_ids)  # noqa: E731


def score_groups(groups: list[PackedGroup]) -> tuple[float, list[list[Score]]]:
    """Scores the groups; returns the seconds spent and the scores of every group."""
    assert _scorer is not None  # start_worker ran in this process
    started = time.perf_counter()
    scores = [_scorer(group) for group in groups]
    return time.perf_counter() - started, scores


def _make_scorer(config: Config, decode: Decoder) -> Scorer:
    training = evaluation = RewardTable(config.rewards, config.reward_options)
    evaluated = evaluation_config(config)
    if (evaluated.rewards, evaluated.reward_options) != (config.rewards, config.reward_options):
        evaluation = RewardTable(evaluated.rewards, evaluated.reward_options)

    def score(packed: PackedGroup) -> list[Score]:
        deadline_s = time.monotonic() + TIME_SHARE * config.generator.reward_timeout_s
        prompt, texts = _decoded(packed, decode)
        return (evaluation if packed.evaluation else training)(
            CompletedGroup(
                prompt=prompt,
                completions=texts,
                completion_ids=packed.completion_ids,
                ground_truth=packed.ground_truth,
                data_source=packed.data_source,
                extra_info=packed.extra_info,
                ground_truth_name=config.data.columns.ground_truth_name,
                chat=packed.chat,
                columns=packed.columns,
                statuses=packed.statuses,
                max_new_tokens=config.generator.max_new_tokens,
                messages=[json.loads(one.messages) for one in packed.episodes if one.messages],
                environment_rewards=[{**one.parts, "score": one.reward} for one in packed.episodes],
                deadline_s=deadline_s,
            )
        )

    return lambda packed: _score_played(packed, score)


def _score_played(packed: PackedGroup, score: Scorer) -> list[Score]:
    """Scores the completions but for those whose environment has failed: these have no reward."""
    if not any(one.error for one in packed.episodes):
        return score(packed)
    played = [index for index, one in enumerate(packed.episodes) if not one.error]
    scores = dict(zip(played, score(packed.select(played)), strict=True)) if played else {}
    return [scores.get(index, (0.0, {}, one.error)) for index, one in enumerate(packed.episodes)]


def _decoded(packed: PackedGroup, decode: Decoder) -> tuple[str, list[str]]:
    """The texts of the prompt and of each completion. That of a plain prompt is the row's own: the decoder leaves out
    special tokens."""
    prompt = memoryview(packed.prompt).cast("i").tolist()
    if not packed.episodes:
        prompt_text, *texts = decode([prompt, *packed.completion_ids])
        return packed.text or prompt_text, texts
    turns: list[list[int]] = []
    for tokens, episode in zip(packed.completion_ids, packed.episodes, strict=True):
        ends = list(accumulate(episode.turn_tokens))
        turns += [tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    prompt_text, *said = decode([prompt, *turns])
    words, texts = iter(said), list[str]()
    for episode in packed.episodes:
        texts.append(TURN_BREAK.join(islice(words, len(episode.turn_tokens))))
    return packed.text or prompt_text, texts
