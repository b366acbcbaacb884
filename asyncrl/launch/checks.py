"""Checks of a run's inputs before any process starts: model, data, rewards, plug-ins, engine options."""

from __future__ import annotations

import functools
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.config.sections import AUTO, ENVIRONMENT, Rewards
from asyncrl.data.demo import make_demo_rows
from asyncrl.data.rows import Split
from asyncrl.environments.environment import Schema
from asyncrl.errors import ConfigError, DataError
from asyncrl.generator.engine import check_installed
from asyncrl.generator.vllm_backend.setup import check_adapters, check_tensor_parallel
from asyncrl.launch.memory import with_changes
from asyncrl.launch.placement import Placement
from asyncrl.launch.row_checks import FirstRow, check_first_row
from asyncrl.observe.console import say
from asyncrl.rewards.table import choose_rewards, describe_choice, evaluation_config, reward_names
from asyncrl.util.files import read_json, tensor_files
from asyncrl.util.processes import PYTHON, raise_file_limit

EVAL_ROWS = 100
"""Number of rows in the evaluation file that a recipe creates."""
OPEN_FILES, OPEN_FILES_PER_ROLE = 256, 4
"""Files that the launcher, the replay queue or learner rank 0 has open: its own, with the journal's and the
libraries', and connections and output files of each role."""
CPU_START_S = 180.0
"""`launch.start_timeout_s` of a run without GPUs."""
RECIPE_S = 600.0
"""Deadline of a recipe."""
TRUTHS_S = 60.0
"""Time after which ground truths are no longer parsed before the start: LaTeX takes milliseconds each."""
MAX_KNOWN_TRUTHS = 1 << 18
"""Ground truths that are remembered, as hashes, so that repeated ones are parsed once."""
RECIPE_END_S = 5.0
"""Time for an interrupted recipe to remove its unfinished output."""

TRAINED_LAYERS = ("full_attention", "sliding_attention", "attention")
"""Layer types that mix tokens by attention only."""
SWITCHING_POSITIONS = ("dynamic", "longrope", "su")
"""Types of rotary positions that depend on the length of the longest sequence."""
UNTRAINED_SETTINGS = ("attn_logit_softcapping", "final_logit_softcapping", "logits_scaling", "logit_scale")
"""Model settings that change attention scores, or logits after the output layer."""


def run_recipes(config: Config, console: Console) -> None:
    """Creates the data and the model of `recipe` that do not exist yet."""
    if config.recipe is None:
        return
    for key, files in (("data.train", config.data.train_files), ("data.eval", config.data.eval_files)):
        if not files or any(Path(file).exists() for file in files):
            continue
        if len(files) != 1:
            raise ConfigError(f"recipe = {config.recipe!r}: makes one file, {key} names several")
        say(console, f"making the rows of {config.recipe} in {files[0]} ...")
        # Demos train on all rows that there can be, so the evaluation rows are a sample of the training rows.
        make_demo_rows(config.recipe, Path(files[0]), seed=config.seed, rows=EVAL_ROWS if key == "data.eval" else None)
    if not Path(config.model.path).exists():
        _make_model(config.recipe, config.model.path, config.seed, console)


def _make_model(demo: str, path: str, seed: int, console: Console) -> None:
    """Makes the model in another process: the launcher does without torch."""
    say(console, f"making the model of {demo} in {path} ...")
    command = [*PYTHON, "-m", "asyncrl.data.tiny_model", demo, path, str(seed)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, errors = process.communicate(timeout=RECIPE_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(RECIPE_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise ConfigError(
                f"making the model of {demo} in {path} took longer than {RECIPE_S:g} s; start again while nothing "
                "else uses the machine"
            ) from None
    if process.returncode:
        raise ConfigError(f"making the model of {demo} in {path} failed:\n{errors.strip()}")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Properties of the config's model and algorithm that roles need. Only the launcher determines them, since they
    require importing the user's code."""

    config: Config
    """The config of the run, with the rewards that "auto" stands for."""
    rows: int
    """Rows of the training data."""
    prompt_tokens: int
    """Longest prompt that fits the model's window."""
    group_relative: bool
    """True if the advantage of a group whose rewards are all equal is 0."""
    greedy_baseline: bool
    """True if the advantage needs the reward of a greedy completion of every prompt."""
    first_row: FirstRow


def check_inputs(config: Config, console: Console) -> Inputs:
    """Returns the properties that roles need. Raises ConfigError or DataError if a model, file, reward, plug-in or
    option of the config is missing or cannot be used."""
    prompt_tokens = check_model(config)
    config, rows = check_data_and_rewards(config, console)
    tools = check_environments(config, console, prompt_tokens) if config.environment.name is not None else {}
    check_installed(config)
    if config.generator.engine == "vllm":
        check_tensor_parallel(config)
        check_adapters(config)
    # Last, because these import torch.
    from asyncrl.launch.registry import check_parts
    from asyncrl.learner.algorithm import check_algorithm, is_group_relative, needs_greedy_baseline

    names = [config.generator.engine, config.weights.transport, config.launch.cluster, *config.observe.trackers]
    announce_imports(console, names)
    check_parts(config)
    check_weights(config)
    announce_imports(console, [config.algorithm.advantage, config.algorithm.loss])
    advantage, _ = check_algorithm(config)
    first = check_first_row(config, prompt_tokens=prompt_tokens, tools=tools)
    return Inputs(config, rows, prompt_tokens, is_group_relative(advantage), needs_greedy_baseline(advantage), first)


def length_of(config: Config, rows: int, console: Console) -> dict[str, Any]:
    """The update of a config with `epochs`: the steps that it stands for with this many training rows. Raises
    ConfigError if `observe.profile` has later steps."""
    if config.epochs is None:
        return {}
    steps = max(1, round(config.epochs * rows / config.replay.groups_per_step))
    try:
        config.observe.check_profile(steps)
    except ValueError as error:
        raise ConfigError(f"{error} (epochs = {config.epochs:g} of {rows:,} rows)") from None
    say(console, f"{config.epochs:g} epochs of {rows:,} rows: {steps:,} steps")
    return {"steps": steps, "epochs": None}


def announce_imports(console: Console, names: Iterable[str]) -> None:
    """Prints the user's modules that are imported next, since their import may take long or print text."""
    for name in names:
        if ":" in name:
            say(console, f"importing {name.rpartition(':')[0]} ...")


def check_data_and_rewards(config: Config, console: Console) -> tuple[Config, int]:
    """Returns the config with the rewards that auto stands for, which are printed, and the number of training rows.

    Raises ConfigError or DataError unless the files can be used, the rewards of training and of evaluations can be
    loaded, and every data source has a reward.
    """
    from asyncrl.rewards.reward_model import check_failed

    rows = check_data(config, console)
    splits: tuple[Split, ...] = ("train", "eval") if config.eval.rewards is None else ("train",)
    config = config.model_copy(update={"rewards": checked_rewards(config, splits, console)})
    check_failed(config)
    if config.eval.rewards is not None:
        config = with_changes(config, {"eval.rewards": checked_eval_rewards(config, ("eval",), console)})
    return config, rows


def check_environments(config: Config, console: Console, prompt_tokens: int) -> dict[str, Sequence[Schema]]:
    """Returns the tools of each environment, and prints warnings about the chat template.

    Raises ConfigError unless the environments of the config can be loaded, every data source has one, and the first
    prompt of the training data, of at most `prompt_tokens` tokens, is one that they can be played with: messages under
    a chat template that can be used, or plain text if they have no tools. Agent programs also need a template."""
    from asyncrl.data.prompts import TrainingRows
    from asyncrl.data.rows import count_sources
    from asyncrl.environments.dialogue.template_checks import check_chat
    from asyncrl.environments.table import check_environment, environment_for, environment_names

    assert config.environment.name is not None
    announce_imports(console, environment_names(config.environment.name))
    table = check_environment(config)
    for source in count_sources(config, ("train", "eval")):
        environment_for(config.environment.name, source)
    prompt = TrainingRows(config, limit_tokens=prompt_tokens).prompt(0)
    if prompt.chat is not None or table.programs:
        for note in check_chat(config, prompt, table.tools):
            say(console, f"warning: {note}")
    for name, tools in table.tools.items():
        if tools and prompt.chat is None:
            raise ConfigError(
                f"environment.name: {name} has tools, which a chat template shows, but the prompts of "
                f"{config.data.train_files[0]} are plain text; give messages, or set data.string_prompts=user"
            )
    return table.tools


def check_data(config: Config, console: Console) -> int:
    """Returns the number of training rows. Raises ConfigError or DataError unless the data can be used."""
    from asyncrl.data.rows import check_dataset

    custom = config.data.custom
    announce_imports(console, dict.fromkeys(filter(None, (custom.dataset, custom.sampler, custom.filter))))
    return check_dataset(config)


def checked_rewards(config: Config, splits: Sequence[Split], console: Console, section: str = "") -> Rewards:
    """Returns the rewards of the config, or those that auto stands for with the rows of the splits. Raises ConfigError
    unless they can be loaded and every data source in the splits has one. `section` precedes keys that are printed."""
    from asyncrl.data.rows import count_sources
    from asyncrl.rewards.table import check_rewards, check_sources

    sources = count_sources(config, splits)
    if config.rewards == AUTO:
        config = config.model_copy(update={"rewards": choose_rewards(config, sources)})
        for line in describe_choice(sources) if config.rewards != ENVIRONMENT else ():
            say(console, line.replace("rewards:", f"{section}rewards:", 1))
    names = reward_names(config.rewards)
    announce_imports(console, names)
    check_rewards(config)
    if config.environment.name is not None and ENVIRONMENT not in names:
        text = f"warning: {section}rewards: the reward of the environment does not count; {ENVIRONMENT}: 1.0 adds it"
        say(console, text)
    check_sources(config.rewards, sources)
    check_truths(config, splits, console)
    return config.rewards


def check_truths(config: Config, splits: Sequence[Split], console: Console) -> None:
    """Raises DataError that names the first row of the splits with a ground truth that a built-in reward cannot read,
    and ConfigError for such a reward without ground truths. Training rows that `data.custom.filter` drops do not count.
    Prints a warning about rows that are not read within TRUTHS_S."""
    from asyncrl.data.custom import load_filter
    from asyncrl.data.rows import dataset_files, ground_truths, raw_rows
    from asyncrl.rewards.table import TRUTHS, truth_reader

    comparing = {"exact", *TRUTHS} & set(reward_names(config.rewards))
    if comparing and config.data.columns.ground_truth is None:
        raise ConfigError(
            f"rewards = {config.rewards!r}: {', '.join(sorted(comparing))} compares with a ground truth, and "
            "data.columns.ground_truth is null; name its column, or a reward that needs none"
        )
    if comparing <= {"exact"}:  # which reads any text
        return
    keeps = load_filter(config) if config.data.custom.filter is not None else None
    raw_training_rows = functools.cache(lambda: raw_rows(config, "train"))
    read, deadline_s = truth_reader(config), time.monotonic() + TRUTHS_S
    known: set[int] = set()
    for split in splits:
        for row, where, source, truth in ground_truths(config, split) if dataset_files(config, split) else ():
            if (key := hash((source, truth))) in known:
                continue
            if time.monotonic() > deadline_s:
                text = f"warning: ground truths from {where} on are parsed when they are used (after {TRUTHS_S:g} s)"
                say(console, text)
                return
            try:
                read(source, truth)
            except ValueError as error:
                if split == "train" and keeps is not None and not keeps(raw_training_rows().values(row), where):
                    continue
                raise DataError(
                    f"{where}: {config.data.columns.ground_truth!r}: {error}; correct it, leave the row out "
                    f"(data.custom.filter), or name another reward for data source {source!r} (rewards)"
                ) from None
            if len(known) < MAX_KNOWN_TRUTHS:
                known.add(key)


def checked_eval_rewards(config: Config, splits: Sequence[Split], console: Console) -> Rewards:
    """Returns what `checked_rewards` returns for evaluations. Its errors name the keys of section `eval`."""
    try:
        return checked_rewards(evaluation_config(config), splits, console, "eval.")
    except ConfigError as error:
        key = "eval." if str(error).startswith("reward") else "eval.rewards: "
        raise ConfigError(f"{key}{error}") from None


def check_model(config: Config) -> int:
    """Returns the maximum number of prompt tokens that fit the model's window. Raises ConfigError unless `model.path`
    is the folder of a trainable model."""
    folder, key = Path(config.model.path), f"model.path = {config.model.path!r}"
    if not folder.is_dir():
        raise ConfigError(
            f"{key}: no such folder; use a folder in Hugging Face format or OWNER/NAME of the hub, or set recipe=demo "
            "to create a small one there"
        )
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{key}: {name} is missing; is it a Hugging Face model folder?")
    settings = read_json(folder / "config.json", "model.path")
    check_architecture(settings, config.model.path)
    check_files(config.model.path, "model.path")
    for key, path in other_models(config):
        if Path(path).is_dir():
            check_files(path, key)
    window, wanted = settings.get("max_position_embeddings"), config.generator.max_model_tokens
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ConfigError(
            f"model.path: {folder / 'config.json'}: max_position_embeddings = {window!r}; must be a number of tokens"
        )
    if wanted is not None and window is not None and wanted > window:
        raise ConfigError(f"generator.engine_options.max_model_len = {wanted}: the model's window is {window}")
    window = wanted or window
    if window is None:
        raise ConfigError(
            "generator.engine_options.max_model_len: must be set, since config.json of the model has no window"
        )
    check_positions(settings, config.model.path, window)
    prompt_tokens = window - config.generator.max_new_tokens
    if prompt_tokens < 1:
        raise ConfigError(
            f"generator.max_new_tokens = {config.generator.max_new_tokens}: leaves no room for a prompt in a window of "
            f"{window} tokens; lower it"
        )
    return min(prompt_tokens, config.data.max_prompt_tokens or prompt_tokens)


def with_start_deadline(config: Config, placement: Placement) -> Config:
    """Returns the config with the deadline for starts of a run without GPUs, unless the deadline is configured."""
    if placement.gpus or "start_timeout_s" in config.launch.model_fields_set:
        return config
    return with_changes(config, {"launch.start_timeout_s": CPU_START_S})


def check_machine(config: Config) -> None:
    """Raises this process's limit of open files, and ConfigError unless it is enough for the roles and the data."""
    roles = config.launch.generators + config.launch.learners + config.critic.ranks
    needed = OPEN_FILES + OPEN_FILES_PER_ROLE * roles + len(config.data.train_files) + len(config.data.eval_files)
    limit = raise_file_limit()
    if limit < needed:
        raise ConfigError(
            f"launch.generators = {config.launch.generators}: the run needs up to {needed:,} open files in a process, "
            f"and the system allows {limit:,} (ulimit -Hn); raise it (limits.conf, systemd's LimitNOFILE, docker's "
            "--ulimit nofile), or use fewer generators"
        )


def check_positions(settings: dict[str, Any], path: str, window: int) -> None:
    """Raises ConfigError if the model scales the positions of all sequences of a row by the longest of them, when it is
    longer than a limit below the window."""
    text = settings.get("text_config") or settings
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    for part in (rope, *rope.values()):
        kind = part.get("rope_type", part.get("type")) if isinstance(part, dict) else None
        if kind not in SWITCHING_POSITIONS:
            continue
        default = text.get("original_max_position_embeddings", text.get("max_position_embeddings", window))
        limit = part.get("original_max_position_embeddings", default)
        if window > limit:
            raise ConfigError(
                f"model.path = {path!r}: config.json has rope_type {kind!r}, which computes positions in another way "
                f"when a sequence is longer than {limit} tokens; sequences in one row cannot differ in that: set "
                f"generator.engine_options.max_model_len={limit}"
            )


def other_models(config: Config) -> list[tuple[str, str]]:
    """Returns the keys and paths of the models that the learner loads besides the policy."""
    named = (("algorithm.reference", config.algorithm.reference), ("critic.path", config.critic.path))
    return [(key, path) for key, path in named if path is not None]


def check_files(path: str, key: str) -> None:
    """Raises ConfigError unless a model's folder has complete weights that are neither quantized nor an adapter."""
    folder = Path(path)
    if (folder / "adapter_config.json").exists():
        raise ConfigError(
            f"{key} = {path!r}: has adapter_config.json; merge the adapter into the model, or remove its files"
        )
    settings = read_json(folder / "config.json", key)
    if settings.get("quantization_config") is not None:
        method = settings["quantization_config"].get("quant_method")
        raise ConfigError(
            f"{key} = {path!r}: config.json has quantization_config ({method}); quantized weights cannot be trained, "
            "use the model in bfloat16 or float32 (generator.engine_options.quantization quantizes the engine alone)"
        )
    try:
        tensor_files(folder)
    except ConfigError as error:
        raise ConfigError(f"{key} = {path!r}: {error}") from None


def check_weights(config: Config) -> None:
    """Raises ConfigError if a folder's tensors contradict its config.json: a tied output layer with separate values,
    or tensors that the model lacks. Where the library renames tensors, the learner does this. Imports torch."""
    from asyncrl.launch.memory import empty_model_of
    from asyncrl.learner.model.loading import refuse_unexpected
    from asyncrl.weights.model_tensors import check_tied, checkpoint_tensors, unexpected_tensors

    for key, path in [("model.path", config.model.path), *other_models(config)]:
        if key == "critic.path" or not Path(path).is_dir():
            continue  # the critic's head is new
        model, files = empty_model_of(path, config.model.trust_remote_code, values=False), tensor_files(Path(path))
        check_tied(model, files, named := f"{key} = {path!r}")
        tensors = checkpoint_tensors(model)
        if tensors is not None and all(tensor.name in files for tensor in tensors):
            refuse_unexpected(unexpected_tensors(model, tensors, files), named)


def check_architecture(settings: dict[str, Any], path: str) -> None:
    """Raises ConfigError if the model's `config.json` shows that the learner cannot train it. Properties that the file
    does not show are measured by the learner."""
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
