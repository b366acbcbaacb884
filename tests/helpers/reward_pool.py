"""A pool of reward workers, its tokenizer and its prompts; imported in a moment, also by the workers of a script."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from asyncrl.config.config import Config
from asyncrl.rewards.pool import RewardPool, Scored
from asyncrl.types import Prompt

TOKENS = ["<pad>", "<eos>", "<unk>", *"0123456789+="]


def save_tokenizer(folder: Path, extra: str = "") -> None:
    """One token per character, also of `extra`."""
    names = [*TOKENS, *extra]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(TOKENS[:3])
    tokenizer.save(str(folder / "tokenizer.json"))


def make_config(
    rewards: object, timeout_s: float = 20.0, workers: int = 1, options: object = None, **data: str
) -> Config:
    generator = {"reward_timeout_s": timeout_s, "reward_workers": workers, "max_new_tokens": 10}
    values = {"model": {"path": "m"}, "data": {"train": "d", **data}, "rewards": rewards, "generator": generator}
    return Config.model_validate({**values, "reward_options": options or {}})


def tokens(text: str) -> list[int]:
    return [*(TOKENS.index(character) for character in text), TOKENS.index("<eos>")]


def prompt(source: str = "sums", **extra: object) -> Prompt:
    return Prompt(0, np.array(tokens("12+07=")[:-1], dtype=np.int32), "19", source, extra)


def submit(pool: RewardPool, key: object, completions: list[list[int]], prompt: Prompt) -> None:
    pool.submit(key, completions, prompt, ["completed"] * len(completions))


def gather(pool: RewardPool, count: int, *, within_s: float = 150.0) -> dict[object, Scored]:
    found: dict[object, Scored] = {}
    deadline = time.monotonic() + within_s
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} groups scored"
        for scored in pool.collect():
            assert scored.key not in found
            found[scored.key] = scored
        time.sleep(0.005)
    assert pool.pending == 0
    return found
