"""Whether a run can go on, and with which settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.config import Config, config_keys, load_config
from asyncrl.errors import ConfigError
from asyncrl.files import read_json, replace_file
from asyncrl.launch.numbered import first_free
from asyncrl.observe.report import read_metrics

FREE_SECTIONS = ("launch", "observe", "weights", "checkpoint", "journal")
FREE_KEYS = {
    "steps", "resume", "run", "eval.every_steps",
    "generator.max_running_groups", "generator.reward_workers", "generator.reward_timeout_s",
    "generator.kv_cache_bytes", "generator.gpu_memory_fraction", "generator.engine_options",
    "replay.lease_timeout_s", "replay.max_bytes", "replay.max_refunds_in_a_row",
    "learner.tokens_per_microbatch", "learner.gradient_checkpointing", "learner.deepspeed_options",
    "learner.lr", "critic.lr", "learner.max_grad_norm", "learner.max_skipped_updates",
}  # fmt: skip
"""Settings that may be others when a run is resumed. What is learned, and from what, must stay; how far an update goes
may change, since it is the way out when updates are not finite. Then the steps since the newest checkpoint, which are
trained again, come out otherwise than before. That is sound: tokens that were sampled meanwhile keep the log-probs of
the policy that sampled them, and generators of a resumed run start with the new weights."""
FIXED_KEYS = {"launch.learners"}
"""Those of free sections that may not: journal and checkpoints are divided by learner ranks."""


def free_in_resume(key: str) -> bool:
    return key in FREE_KEYS or (key.partition(".")[0] in FREE_SECTIONS and key not in FIXED_KEYS)


def changes(saved: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both."""
    pairs = {key: (_value(saved, key), _value(config, key)) for key in config_keys()}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def refuse_changes(saved: Config, config: Config, allowed: Callable[[str], bool], *, what: str, way_out: str) -> None:
    """Raises ConfigError with every setting that differs and may not."""
    wrong = {key: pair for key, pair in changes(saved, config).items() if not allowed(key)}
    if wrong:
        lines = [f"{key}: it was {before!r}, now {now!r}" for key, (before, now) in wrong.items()]
        raise ConfigError(f"{what}:\n  " + "\n  ".join(lines) + f"\n{way_out}")


def check_resume(config: Config) -> bool:
    """True when the earlier run of this name goes on, false when a new one starts.

    Raises ConfigError when `resume` is "must" and there is none that can, or when a setting differs that may not.
    """
    if config.resume == "never":
        return False
    must = config.resume == "must"
    file = config.run_dir / "config.yaml"
    if not file.is_file():
        if must:
            raise no_run(config.run)
        return False
    summary = _summary(config.run_dir)
    if summary.get("status") == "finished" and summary.get("steps", 0) >= config.steps:
        if must:
            raise ConfigError(
                f"run = {config.run!r}: it has finished its {summary['steps']} steps, there is nothing to resume; "
                "raise --steps to train on"
            )
        return False
    refuse_changes(
        load_config(file),
        config,
        free_in_resume,
        what=f"run = {config.run!r} cannot be resumed with other settings than it was started with",
        way_out="leave them as they were, or start another run with --run NAME and without --resume",
    )
    return True


def config_of_run(name: str) -> Path:
    """The config that a run was started with. Raises ConfigError when there is no such run."""
    file = Path("runs") / name / "config.yaml"
    if not file.is_file():
        raise no_run(name)
    return file


def no_run(name: str) -> ConfigError:
    """The error for a run that does not exist."""
    known = sorted(file.parent.name for file in Path("runs").glob("*/config.yaml"))
    return ConfigError(
        f"run = {name!r}: there is no such run to resume in runs/ (of {', '.join(known) or 'none'}); name one with "
        "--run, or launch without --resume"
    )


def discard_journal(run_dir: Path) -> str:
    """Moves the journal aside, with the metrics of the steps that are lost by it and the trace that has them, and gives
    the file with the queue's state of the newest whole checkpoint. Raises ConfigError when there is none."""
    from asyncrl.learner.checkpoint import newest_checkpoint

    newest = newest_checkpoint(run_dir / "checkpoints")
    if newest is None:
        raise ConfigError(
            f"--discard-journal: {run_dir / 'checkpoints'} has no whole checkpoint, so that nothing would be left to "
            "resume; launch without --resume to start anew, which moves this run aside"
        )
    aside = first_free(run_dir, "journal.discarded-")
    journal = run_dir / "journal"
    if journal.exists():
        journal.rename(aside)
    aside.mkdir(exist_ok=True)
    cut_metrics(run_dir / "metrics.jsonl", read_json(newest / "checkpoint.json")["step"], aside)
    for trace in run_dir.glob("trace.*"):
        shutil.copyfile(trace, aside / trace.name)
    # The run goes on from it until its journal has a state, while newer checkpoints take the place of this one.
    return str(shutil.copyfile(newest / "queue.msgpack", aside / "queue.msgpack"))


def cut_metrics(file: Path, step: int, aside: Path) -> None:
    """Moves the rows of later steps to a file of that name in `aside`."""
    rows = read_metrics(file)
    for path, kept in (
        (aside / file.name, [row for row in rows if row["step"] > step]),
        (file, [row for row in rows if row["step"] <= step]),
    ):
        replace_file(path, "".join(json.dumps(row) + "\n" for row in kept))


def _summary(run_dir: Path) -> dict[str, Any]:
    file = run_dir / "summary.json"
    return read_json(file) if file.is_file() else {}


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
