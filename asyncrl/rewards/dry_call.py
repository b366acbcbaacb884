"""Scores a made-up completion with the reward functions of a run before it starts: what would fail every group is an
error then, before a model is loaded.

A function may rightly raise for a completion that it cannot read, and this one is nobody's answer. So only faults of
the function or the columns are errors: a missing column, no finite number in return, the end of its
process, and exceptions of BUG, unless they speak of None, as after a search without a match, or quote the completion,
as the key of a table. All others are warnings, such as a service that does not answer; with an environment, whose
messages and parts are not known yet, all are. Built-in rewards are not called: `reward_model` needs its process, which
the run starts, and the others have parsed the ground truths.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.rewards.calling import PlayedEpisode
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.table import names_in, reward_for
from asyncrl.types import Prompt
from asyncrl.util.text import shortened

BUG = re.compile(r": raised (?:AttributeError|ImportError|KeyError|ModuleNotFoundError|NameError|TypeError): ([^;]*)")
MAY_BE = re.compile(r": (?:raised|took longer than|(?:all )?returned None)")
"""Causes that the completion may have, or a service."""
MAX_CHARACTERS = 200
"""Maximum length of the ground truth in the completion."""
MEMBERS = 2
"""Size of the group of the completion, so that a function that returns one number for all is found."""
POLL_S = 0.005


def custom_functions(config: Config, data_source: str) -> set[str]:
    """The functions in the reward of a data source that are not built in."""
    return {name for name in names_in(reward_for(config.rewards, data_source)) if ":" in name}


def dry_call(config: Config, prompts: Sequence[Prompt], tokenizer: Any) -> tuple[list[str], list[str]]:
    """Scores a completion of each prompt, of different data sources, by the functions in its reward that are not built
    in, in a reward worker with the deadlines of the run. Returns their results, and the warnings. Raises
    ConfigError for certain faults."""
    functions = {prompt.data_source: custom_functions(config, prompt.data_source) for prompt in prompts}
    rewards = {source: dict.fromkeys(sorted(names), 1.0) for source, names in functions.items() if names}
    if not rewards:
        return [], []
    called = set().union(*functions.values())
    update = {
        "rewards": rewards,
        "reward_options": {name: values for name, values in config.reward_options.items() if name in called},
        "eval": config.eval.model_copy(update={"rewards": None}),
        "generator": config.generator.model_copy(update={"reward_workers": 1}),
    }
    pool = RewardPool(config.model_copy(update=update), tokenizer_path=config.model.path)
    results, warnings = list[str](), list[str]()
    try:
        for prompt in [prompt for prompt in prompts if prompt.data_source in rewards]:
            text = made_up(prompt)
            tokens = tokenizer.encode(text, add_special_tokens=False)
            error, parts = _score(pool, prompt, text, tokens, is_episode=config.environment.name is not None)
            problem = f"a made-up completion, {text!r}, has no reward: {error}"
            if error and config.environment.name is None and is_bug(error, text):
                raise ConfigError(f"rewards: {problem}")
            warnings += [problem] if error else []
            names = sorted(functions[prompt.data_source] & parts.keys())
            results += [f"{name} gives {parts[name]:g} for {text!r}" for name in names]
    finally:
        pool.close()
    return results, warnings


def made_up(prompt: Prompt) -> str:
    """The ground truth in a sentence, which is no JSON and has no name of a column."""
    return f"So it is \\boxed{{{shortened(prompt.ground_truth, MAX_CHARACTERS)}}}."


def is_bug(error: str, completion: str) -> bool:
    """True if the error text of a made-up completion has a cause that all completions share."""
    causes = error.split("; reward ")  # of the functions in a sum
    bugs = [cause for cause in causes if not MAY_BE.search(cause)]
    texts = [text.strip("'\"") for text in BUG.findall(error)]
    return bool(bugs) or any("NoneType" not in text and text not in completion for text in texts)


def _score(
    pool: RewardPool, prompt: Prompt, text: str, tokens: list[int], *, is_episode: bool
) -> tuple[str, dict[str, float]]:
    """The error text of the completion, and its parts. The pool enforces deadlines."""
    messages = b"" if prompt.chat is None else json.dumps([{"role": "assistant", "content": text}]).encode()
    episodes = [PlayedEpisode([len(tokens)], messages, 0.0, {}, "")] * MEMBERS if is_episode else []
    pool.submit(prompt.data_source, [tokens] * MEMBERS, prompt, ["completed"] * MEMBERS, episodes=episodes)
    while not (scored := pool.collect()):
        time.sleep(POLL_S)
    errors, parts = scored[0].errors, scored[0].parts
    return max(errors, key=bool), parts[errors.index("") if "" in errors else 0]
