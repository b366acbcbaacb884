"""The code of a reward worker: a process with the user's functions and a tokenizer, without torch and numpy."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import accumulate, islice

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.rewards import reward_model
from asyncrl.rewards.calling import TURN_BREAK, CompletedGroup, Score
from asyncrl.rewards.table import RewardTable, evaluation_config
from asyncrl.util.model_files import load_decoder
from asyncrl.util.processes import become_helper
from asyncrl.util.text import redact
from asyncrl.wire.endpoints import Endpoints

TIME_SHARE = 0.9
"""Fraction of the time limit that functions see as theirs; the rest is for returning the scores."""

_scorer: Scorer | str = "start_worker was not called"
"""The scorer of this process, or the error text of every completion."""


def start_worker(parent: int, config: Config, tokenizer_path: str, endpoints: Endpoints | None) -> None:
    """Makes this process a reward worker: it ends with `parent`, uses one thread, and loads the functions.

    Never raises: when a function cannot be loaded, every group gets that error.
    """
    global _scorer
    become_helper(parent)
    try:
        reward_model.connect(endpoints)
        _scorer = Scorer(config, tokenizer_path)
    except ConfigError as error:
        _scorer = redact(str(error))


def score_groups(groups: list[CompletedGroup]) -> tuple[float, list[list[Score]]]:
    """Scores the groups; returns the seconds spent and the scores of every group."""
    started_s = time.perf_counter()
    if isinstance(_scorer, str):
        return 0.0, [[(0.0, {}, _scorer)] * len(group.completion_ids) for group in groups]
    scores = [_scorer.score(group) for group in groups]
    return time.perf_counter() - started_s, scores


class Scorer:
    """Decodes the tokens of groups, and scores them by the rewards of training or evaluations."""

    def __init__(self, config: Config, tokenizer_path: str) -> None:
        """Raises ConfigError if a function or the tokenizer cannot be loaded."""
        self._decode = load_decoder(tokenizer_path, trust_remote_code=config.model.trust_remote_code)
        self._timeout_s = TIME_SHARE * config.generator.reward_timeout_s
        evaluation = evaluation_config(config)
        self._training = RewardTable(config.rewards, config.reward_options)
        self._evaluation = self._training
        if (evaluation.rewards, evaluation.reward_options) != (config.rewards, config.reward_options):
            self._evaluation = RewardTable(evaluation.rewards, evaluation.reward_options)

    def score(self, group: CompletedGroup) -> list[Score]:
        """A score for each completion; a completion whose environment has failed has the environment's error."""
        deadline_s = time.monotonic() + self._timeout_s
        table = self._evaluation if group.is_evaluation else self._training
        failed = {index: episode.error for index, episode in enumerate(group.episodes) if episode.error}
        played = [index for index in range(len(group.completion_ids)) if index not in failed]
        if not played:
            return [(0.0, {}, error) for error in failed.values()]
        group = self._with_texts(replace(group.select(played) if failed else group, deadline_s=deadline_s))
        scores = dict(zip(played, table(group), strict=True))
        return [scores[index] if index in scores else (0.0, {}, failed[index]) for index in sorted({*played, *failed})]

    def _with_texts(self, group: CompletedGroup) -> CompletedGroup:
        """The text of a plain prompt is the row's: the decoder leaves out special tokens."""
        prompt = memoryview(group.prompt_tokens).cast("i").tolist()
        if not group.episodes:
            prompt_text, *texts = self._decode([prompt, *group.completion_ids])
            return replace(group, prompt=group.prompt or prompt_text, completions=texts)
        turns: list[list[int]] = []
        for tokens, episode in zip(group.completion_ids, group.episodes, strict=True):
            ends = list(accumulate(episode.turn_tokens))
            turns += [tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        prompt_text, *decoded = self._decode([prompt, *turns])
        words = iter(decoded)
        texts = [TURN_BREAK.join(islice(words, len(episode.turn_tokens))) for episode in group.episodes]
        return replace(group, prompt=group.prompt or prompt_text, completions=texts)
