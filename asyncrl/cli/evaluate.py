"""`asyncrl eval`: evaluates the policy in a folder on the prompts of `data.eval`, in this process and its reward
workers or environment hosts."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import structlog
from rich.console import Console
from rich.table import Table

from asyncrl.config.config import Config
from asyncrl.data.hub import fetch, is_model_name
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import check_data, check_environments, check_model, checked_eval_rewards, checked_rewards
from asyncrl.launch.run_dir import run_endpoints
from asyncrl.learner.checkpoint import MANIFEST
from asyncrl.observe.console import EXIT_DONE, EXIT_INTERRUPTED, Interrupts
from asyncrl.observe.sample_search import PARQUET, check_samples_file
from asyncrl.observe.samples import Samples
from asyncrl.replay.evaluation import PromptScore, pass_ks, score_table
from asyncrl.rewards.reward_model import await_reward_model, uses_reward_model
from asyncrl.rewards.table import evaluation_config
from asyncrl.types import Group, Prompt
from asyncrl.util.files import check_writable, read_json, replace_file
from asyncrl.util.model_files import load_decoder
from asyncrl.wire.endpoints import Endpoints

if TYPE_CHECKING:
    from asyncrl.generator.loop import Evaluator

PROGRESS_EVERY_S = 5.0
RESULTS = {"model", "settings", "metrics", "prompts"}
"""Keys that identify a file of results."""


def evaluate(config: Config, console: Console, *, model: str | None = None, outs: Sequence[Path] = ()) -> int:
    """Evaluates the model in a folder, prints a table by data source and returns the exit code. Writes to each of
    `outs`: the completions with their texts (`Samples`) to a Parquet file, or else metrics and rewards as JSON.

    The default folder has the run's trained model if it exists, else `model.path`. Raises ConfigError when the
    config, the folder or the data cannot be used.
    """
    config = fetch(use_folder(config, model), console)
    for out in outs:
        check_out(out)
    limit_tokens, config = check_evaluation(config, console)
    quiet_logs()
    interrupts = Interrupts()
    with interrupts.caught():
        from asyncrl.data.prompts import eval_prompts

        prompts = eval_prompts(config, limit_tokens=limit_tokens)
        console.print(f"evaluating {config.model.path} on {len(prompts)} prompts ...", highlight=False, soft_wrap=True)
        work = evaluate_prompts(config, prompts, console, should_stop=lambda: interrupts.count > 0)
    if len(work.results) < len(prompts):
        console.print(f"interrupted after {len(work.results)} of {len(prompts)} prompts: nothing is written")
        return EXIT_INTERRUPTED
    scores = {result.ticket: PromptScore.of(result) for result in work.results}
    metrics = score_table(scores.values())
    print_table(console, metrics, config.eval.samples)
    for out in outs:
        if out.suffix == PARQUET:
            write_samples(out, config, prompts, work.groups)
        else:
            write_json(out, config, metrics, [(prompts[index], scores[index]) for index in sorted(scores)])
        console.print(f"written    {out}", highlight=False, soft_wrap=True)
    return EXIT_DONE


def use_folder(config: Config, model: str | None) -> Config:
    """The config with the folder to evaluate as `model.path`, or the name of a model of the hub; of a checkpoint it is
    `model/`. Raises ConfigError when `model` is neither."""
    if model is not None and not Path(model).is_dir() and not is_model_name(model):
        raise ConfigError(
            f"--model {model}: no such folder; give one in Hugging Face format, such as a run's model/, or a "
            "checkpoint, such as its checkpoints/step-000050, or OWNER/NAME of the hub"
        )
    if model is not None and (Path(model) / MANIFEST).is_file():
        model = str(Path(model) / "model")
    trained = config.run_dir / "model"
    folder = model or (str(trained) if trained.is_dir() else config.model.path)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": folder}), "recipe": None})


def check_out(out: Path) -> None:
    """Raises ConfigError when the file cannot be written, or exists and holds no results of this command."""
    if out.suffix == PARQUET:
        check_samples_file(out)
        return
    check_writable(out, "--out")
    if not out.exists():
        return
    try:
        ours = read_json(out).keys() >= RESULTS
    except ConfigError:
        ours = False
    if not ours:
        raise ConfigError(f"--out {out}: exists and holds no results of this command; name another file")


def check_evaluation(config: Config, console: Console) -> tuple[int, Config]:
    """Returns the number of prompt tokens that the model's window leaves, and the config with the rewards of
    evaluations. Raises ConfigError for any error that can be found before the engine starts."""
    if not config.data.eval_files:
        raise ConfigError("data.eval: required, but not set; give Parquet files as data.eval=FILE or data.eval=[A,B]")
    room = check_model(config)
    # Training files are not checked: they may be deleted.
    data = config.data.model_copy(update={"train": config.data.eval_files, "eval": None, "weights": None})
    given = config.model_copy(update={"data": data})
    check_data(given, console)
    checked = checked_rewards if config.eval.rewards is None else checked_eval_rewards
    rewards = checked(given, ("train",), console)
    if given.environment.name is not None:
        check_environments(given, console, room)
    return room, evaluation_config(config).model_copy(update={"rewards": rewards})


def evaluate_prompts(
    config: Config, prompts: list[Prompt], console: Console, *, should_stop: Callable[[], bool]
) -> Evaluator:
    """Completes and scores all prompts, and returns the results; the ticket is the index of the prompt. There are fewer
    results after `should_stop()`."""
    from asyncrl.environments.pool import EnvironmentPool
    from asyncrl.generator.engine import make_own_engine
    from asyncrl.generator.loop import Evaluator
    from asyncrl.rewards.pool import RewardPool

    with ExitStack() as parts:
        rewards = environments = None
        if config.has_reward_functions:
            endpoints = parts.enter_context(reward_model(config, should_stop)) if uses_reward_model(config) else None
            rewards = RewardPool(config, tokenizer_path=config.model.path, endpoints=endpoints, retries=True)
            parts.callback(rewards.close)
        engine = make_own_engine(config)
        parts.callback(engine.close)
        if config.environment.name is not None:
            alone = Endpoints(run_id=uuid.uuid4().hex, replay="", weights="", learners="")
            environments = EnvironmentPool(config, window_tokens=engine.window_tokens, endpoints=alone)
            parts.callback(environments.close)
        work = Evaluator(config, engine, prompts, rewards=rewards, environments=environments)
        shown_s = time.monotonic()
        with console.status("evaluating") as status:
            while len(work.results) < len(prompts) and not should_stop():
                work.tick()
                text = f"{len(work.results)}/{len(prompts)} prompts"
                status.update(text)
                if not console.is_terminal and time.monotonic() - shown_s >= PROGRESS_EVERY_S:
                    shown_s = time.monotonic()
                    console.print(text, highlight=False)
    return work


@contextmanager
def reward_model(config: Config, should_stop: Callable[[], bool]) -> Iterator[Endpoints]:
    """Serves the config's reward model in a thread of this process; yields its address."""
    from asyncrl.rewards.model_server import run_reward_model

    done = threading.Event()
    with run_endpoints(config.on_this_machine, reward_model=True) as endpoints, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(run_reward_model, config, endpoints=endpoints, should_stop=done.is_set)
        try:
            await_reward_model(
                endpoints,
                timeout_s=config.launch.start_timeout_s,
                should_stop=lambda: should_stop() or serving.done(),
            )
            if serving.done():
                serving.result()  # raises the error that kept it from serving
            yield endpoints
        finally:
            done.set()


def print_table(console: Console, metrics: dict[str, float], samples: int) -> None:
    """Prints one row for each data source, and one for all prompts."""
    names = ["prompts", "reward", *(f"pass@{k}" for k in pass_ks(samples)), "completion_tokens", "truncated", "failed"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("data source", no_wrap=True)
    for name in names:
        table.add_column(name.removeprefix("completion_"), justify="right", no_wrap=True)
    sources = [key.removesuffix("/prompts") for key in metrics if key.endswith("/prompts")]
    for label, prefix in [*((source, f"{source}/") for source in sources), ("all", "")]:
        table.add_row(label, *(_number(name, metrics.get(prefix + name, math.nan)) for name in names))
    console.print(table)


def _number(name: str, value: float) -> str:
    return f"{value:.0f}" if name in ("prompts", "failed") else f"{value:.4g}"


def write_json(out: Path, config: Config, metrics: dict[str, float], scored: list[tuple[Prompt, PromptScore]]) -> None:
    """Writes model, settings, metrics, and the rewards of every prompt."""
    rows = [
        {"row": prompt.row, "data_source": score.data_source, "rewards": score.rewards, "status": score.status}
        for prompt, score in scored
    ]
    report = {
        "model": config.model.path,
        "data": config.data.eval_files,
        "settings": config.eval.model_dump(mode="json", exclude={"every_steps", "rewards"})
        | config.generator.model_dump(mode="json", include={"max_new_tokens", "stop"})
        | {"rewards": config.rewards, "seed": config.seed},
        "metrics": metrics,
        "prompts": rows,
    }
    replace_file(out, json.dumps(report, indent=2) + "\n")


def write_samples(out: Path, config: Config, prompts: list[Prompt], groups: list[Group]) -> None:
    """Writes the completions of the prompts, in their order, with the texts and the ground truths."""
    groups = sorted(groups, key=lambda group: group.ticket)
    truths = [prompts[group.ticket].ground_truth for group in groups for _ in group.trajectories]
    decoder = load_decoder(config.model.path, trust_remote_code=config.model.trust_remote_code)
    samples = Samples.of_groups(groups, outcome="evaluated").decode(decoder)
    samples.with_column("ground_truth", pa.array(truths, pa.string())).save(out)


def quiet_logs() -> None:
    """Sends warnings to standard error, and of libraries only errors; this command has no folder for logs."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("warning"),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
