"""Everything that can be known to be wrong before a process starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from asyncrl.config import Config
from asyncrl.errors import ConfigError

EVAL_ROWS = 100
"""Rows of the evaluation file that a data recipe makes."""


def make_missing(config: Config, console: Console) -> None:
    """Makes the data and the model that have a recipe and do not exist yet."""
    if config.data.recipe:
        for key, files in (("data.train", config.data.train_files), ("data.eval", config.data.eval_files)):
            if not files or any(Path(file).exists() for file in files):
                continue
            if len(files) != 1:
                raise ConfigError(f"data.recipe = {config.data.recipe!r}: makes one file, {key} names several")
            # The demo trains on every sum there is, so that the rows it is evaluated on are a sample of them.
            rows = [f"--rows={EVAL_ROWS}"] if key == "data.eval" else []
            _make(console, config.data.recipe, files[0], config.seed, *rows)
    if config.model.recipe and not Path(config.model.path).exists():
        _make(console, config.model.recipe, config.model.path, config.seed)


def _make(console: Console, recipe: str, path: str, seed: int, *options: str) -> None:
    console.print(f"making {recipe} in {path} ...", highlight=False)
    command = [sys.executable, "-m", "asyncrl.cli", "data", recipe, path, "--seed", str(seed), *options]
    done = subprocess.run(command, check=False, timeout=600, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"making {recipe} in {path} failed:\n{done.stderr.strip()}")


def check_inputs(config: Config) -> int:
    """Raises ConfigError for whatever in the config names something that is missing or cannot work.

    Gives the number of prompt tokens that the model's window leaves.
    """
    room = check_model(config)
    check_data_and_rewards(config)
    # Last, because these import torch.
    from asyncrl.launch.parts import check_parts
    from asyncrl.learner.algorithm import check_algorithm

    check_parts(config)
    check_algorithm(config)
    return room


def check_data_and_rewards(config: Config) -> None:
    """Raises ConfigError or DataError unless the files can be used, the rewards load, and every data source has one."""
    from asyncrl.data.parquet import check_dataset, distinct_sources
    from asyncrl.rewards.checks import check_rewards
    from asyncrl.rewards.table import check_sources

    check_dataset(config)
    check_rewards(config)
    check_sources(config.rewards, distinct_sources(config))


def check_model(config: Config) -> int:
    """Raises ConfigError unless `model.path` is a model folder, and gives the tokens it leaves for a prompt."""
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise ConfigError(
            f"model.path = {config.model.path!r}: no such folder; give a folder in Hugging Face format, or set "
            "model.recipe=tiny-model to have a small one made there"
        )
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"model.path = {config.model.path!r}: {name} is missing; is it a Hugging Face model folder?"
            )
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path = {config.model.path!r}: no *.safetensors in it; save the model in that format")
    window = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    if config.generator.max_model_tokens is not None:
        if window is not None and config.generator.max_model_tokens > window:
            raise ConfigError(
                f"generator.max_model_tokens = {config.generator.max_model_tokens}: the model's window is {window}"
            )
        window = config.generator.max_model_tokens
    if window is None:
        raise ConfigError("generator.max_model_tokens: the model does not say its window; set it")
    room = window - config.generator.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"generator.max_new_tokens = {config.generator.max_new_tokens}: leaves no room for a prompt in a window of "
            f"{window} tokens; lower it"
        )
    if config.data.max_prompt_tokens is not None:
        room = min(room, config.data.max_prompt_tokens)
    return room
