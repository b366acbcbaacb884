"""Everything that can be known to be wrong before a process starts."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.generator.vllm_backend.setup import check_engine_options
from asyncrl.rewards.table import reward_names
from asyncrl.util.files import read_json

EVAL_ROWS = 100
"""Rows of the evaluation file that a data recipe makes."""
RECIPE_S = 600.0
"""Longest time that a recipe may take."""
RECIPE_END_S = 5.0
"""Time for a recipe that is told to stop to remove what it has begun."""

TRAINED_LAYERS = ("full_attention", "sliding_attention", "attention")
"""Layer types that pass something from token to token by attention alone."""
UNTRAINED_SETTINGS = ("attn_logit_softcapping", "final_logit_softcapping", "logits_scaling", "logit_scale")
"""Model settings that change attention scores, or logits after the output layer."""


def run_recipes(config: Config, console: Console) -> None:
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
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            _, said = process.communicate(timeout=RECIPE_S)
        except subprocess.TimeoutExpired:
            _end(process)
            raise ConfigError(
                f"making {recipe} in {path} took longer than {RECIPE_S:g} s; make it with `asyncrl data {recipe} "
                f"{path}` while nothing else uses the machine"
            ) from None
    if process.returncode:
        raise ConfigError(f"making {recipe} in {path} failed:\n{said.strip()}")


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(RECIPE_END_S)
    except subprocess.TimeoutExpired:
        process.kill()


@dataclass(frozen=True, slots=True)
class Inputs:
    """Facts that roles need and that only the launcher determines, since it imports what the config names."""

    prompt_tokens: int
    """Longest prompt that fits the model's window."""
    group_relative: bool
    """True if the advantage of a group whose rewards are all equal is 0."""
    greedy_baseline: bool
    """True if the advantage needs the reward of a greedy completion of every prompt."""


def check_inputs(config: Config, console: Console) -> Inputs:
    """Returns facts about what the config names. Raises ConfigError for names of missing things, and for things that
    cannot be used."""
    room = check_model(config)
    check_data_and_rewards(config, console)
    check_engine_options(config)
    # Last, because these import torch.
    from asyncrl.launch.registry import check_parts
    from asyncrl.learner.algorithm import check_algorithm, is_group_relative, needs_greedy_baseline

    announce_imports(console, [config.weights.transport, config.launch.cluster, *config.observe.trackers])
    check_parts(config)
    announce_imports(console, [config.algorithm.advantage, config.algorithm.loss])
    advantage, _ = check_algorithm(config)
    return Inputs(room, is_group_relative(advantage), needs_greedy_baseline(advantage))


def announce_imports(console: Console, names: Iterable[str]) -> None:
    """Prints which modules of the user are imported next: they may take long, or print something themselves."""
    for name in names:
        if ":" in name:
            console.print(f"importing {name.rpartition(':')[0]} ...", highlight=False, markup=False, soft_wrap=True)


def check_data_and_rewards(config: Config, console: Console) -> None:
    """Raises ConfigError or DataError unless the files can be used, the rewards load, and every data source has one."""
    from asyncrl.data.parquet import check_dataset, distinct_sources
    from asyncrl.rewards.table import check_rewards, check_sources

    check_dataset(config)
    announce_imports(console, reward_names(config.rewards))
    check_rewards(config)
    check_sources(config.rewards, distinct_sources(config))


def check_model(config: Config) -> int:
    """Raises ConfigError unless `model.path` is a model folder, and gives the tokens it leaves for a prompt."""
    folder = Path(config.model.path)
    if not folder.is_dir():
        hub = "; a model of the hub has to be downloaded first, `hf download NAME --local-dir FOLDER`"
        raise ConfigError(
            f"model.path = {config.model.path!r}: no such folder; give a folder in Hugging Face format, or set "
            f"model.recipe=tiny-model to have a small one made there{hub if config.model.path.count('/') == 1 else ''}"
        )
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"model.path = {config.model.path!r}: {name} is missing; is it a Hugging Face model folder?"
            )
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path = {config.model.path!r}: no *.safetensors in it; save the model in that format")
    settings = read_json(folder / "config.json", "model.path")
    check_architecture(settings, config.model.path)
    window = settings.get("max_position_embeddings")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ConfigError(
            f"model.path: {folder / 'config.json'}: max_position_embeddings = {window!r}; must be a number of tokens"
        )
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


def check_architecture(settings: dict[str, Any], path: str) -> None:
    """Raises ConfigError for a model whose `config.json` says that the learner cannot train it. What it does not say is
    measured by the learner."""
    text = settings.get("text_config")
    text = text if isinstance(text, dict) else settings
    layers = text.get("layer_types") or ()
    other = next((kind for kind in layers if kind not in TRAINED_LAYERS), None) if isinstance(layers, list) else None
    if other is not None:
        raise ConfigError(
            f"model.path = {path!r}: layer_types in config.json has {other!r}; only {' and '.join(TRAINED_LAYERS)} can "
            "be trained; use a model of the table in docs/models.md"
        )
    for name in UNTRAINED_SETTINGS:
        if text.get(name) not in (None, 1, 1.0):
            raise ConfigError(
                f"model.path = {path!r}: config.json has {name} = {text[name]!r}; models with it cannot be trained; "
                "use a model of the table in docs/models.md"
            )
