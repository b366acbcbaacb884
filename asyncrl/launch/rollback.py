"""The point at which a resumed run continues: its end, or a checkpoint, with everything later put aside.

A rollback is due when, by summary.json, the run stopped because it collapsed. `resume_point` adds its record to
rollbacks.json and moves everything later aside. It is done when `RunFolder.begin` has written the new learning rate to
config.yaml and removed summary.json. A launcher that is killed in between repeats all of it but the record.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.launch.memory import with_changes
from asyncrl.launch.run_dir import read_summary
from asyncrl.observe.collapse import ROLLBACKS, read_rollbacks
from asyncrl.observe.console import say
from asyncrl.observe.curves import step_of
from asyncrl.observe.samples import EVALUATED, TRAINED, evaluated_versions
from asyncrl.observe.samples import FOLDER as SAMPLES
from asyncrl.util.files import next_free_path, read_lines, replace_file

MAX_ROLLBACKS = 2
QUEUE_STATE = "queue.msgpack"
"""The replay queue's part of a checkpoint, and its copy in the folder of a run that continues from one: the state to
start from while the journal is empty."""


def collapse_onset(summary: dict[str, Any]) -> int:
    """The first step of the collapse that stopped the run; 0 if none did."""
    collapse = summary.get("collapse", {})
    return collapse["step"] if collapse.get("stopped") else 0


def is_due(config: Config, summary: dict[str, Any]) -> bool:
    """True if the run of this summary is to be rolled back, or is only rolled back in part."""
    done = len(summary.get("rollbacks", []))
    may_begin = config.learner.on_collapse == "rollback" and done < MAX_ROLLBACKS
    return collapse_onset(summary) > 0 and (may_begin or done < len(read_rollbacks(config.run_dir)))


def config_to_resume(config: Config) -> Config:
    """Returns the config of the run's folder, with which the run is resumed."""
    return load_config(config.run_dir / "config.yaml", {"resume": "auto" if config.resume == "auto" else "must"})


def collapse_error(config: Config, summary: dict[str, Any]) -> str:
    """Returns why the run stopped and what to do, if it stopped because it collapsed; "" otherwise."""
    if not (onset := collapse_onset(summary)):
        return ""
    from asyncrl.learner.checkpoint import CHECKPOINTS, finished_steps, folder_name

    folder, place = config.run_dir / CHECKPOINTS, "the initial model, since no checkpoint is from before"
    if step := max((step for step in finished_steps(folder) if step < onset), default=0):
        place = f"{folder / folder_name(step)}, the newest checkpoint from before"
    runs_dir = "" if config.runs_dir == "runs" else f" runs_dir={config.runs_dir}"
    command = f"asyncrl launch --resume --run {config.run}{runs_dir}"
    rate = f"learner.lr={config.learner.lr / 2:g}"
    if len(read_rollbacks(config.run_dir)) < MAX_ROLLBACKS:
        remedy = f"`{command} learner.on_collapse=rollback {rate}` continues from {place}"
    elif step:
        remedy = f"After {MAX_ROLLBACKS} rollbacks `{command} --discard-journal {rate}` continues from {place}"
    else:
        remedy = f"After {MAX_ROLLBACKS} rollbacks no checkpoint is from before; start another run with --run NAME"
    return f"the training {summary['collapse']['sentence']}. {remedy}"


def resume_point(run_dir: Path, config: Config, console: Console, *, without_journal: bool) -> tuple[Config, str]:
    """Returns the config with which a run is resumed, and the file with the queue's state for an empty journal, "" if
    there is none. Rolls the run back if that is due. A learning rate of the user replaces the run's."""
    if not (run_dir / "config.yaml").is_file():
        return config, ""
    saved, summary, records = load_config(run_dir / "config.yaml"), read_summary(run_dir), read_rollbacks(run_dir)
    state, done = run_dir / QUEUE_STATE, len(summary.get("rollbacks", []))
    if done > len(records):
        raise ConfigError(
            f"{run_dir / ROLLBACKS}: has {len(records)} of the {done} rollbacks in summary.json; restore it, or start "
            "another run with --run NAME"
        )
    rate = config.learner.lr
    if config.resume == "auto" and rate in [record["lr_before"] for record in records]:
        rate = saved.learner.lr  # a scheduler repeats the command
    if not is_due(config, summary):
        if without_journal:
            discard_journal(run_dir)
        return with_changes(config, {"learner.lr": rate}), str(state) if state.is_file() else ""
    if done == len(records):
        records.append(_new_record(run_dir, saved, summary, f"rollback-{done + 1}"))
    record = records[done]
    if rate != saved.learner.lr:
        record["lr_after"] = rate
    replace_file(run_dir / ROLLBACKS, json.dumps(records, indent=2) + "\n")
    put_aside(run_dir, record["to_step"], run_dir / record["aside"])
    say(
        console,
        f"the training {record['sentence']}. It continues from step {record['to_step']} with learner.lr = "
        f"{record['lr_before']:g} -> {record['lr_after']:g} ({done + 1} of {MAX_ROLLBACKS}); what came after is in "
        f"{run_dir / record['aside']}",
        "yellow",
    )
    return with_changes(config, {"learner.lr": record["lr_after"]}), str(state) if state.is_file() else ""


def _new_record(run_dir: Path, saved: Config, summary: dict[str, Any], aside: str) -> dict[str, Any]:
    """Decides on a rollback."""
    from asyncrl.learner.checkpoint import CHECKPOINTS, newest_checkpoint
    from asyncrl.replay.state import Snapshot

    onset, collapse = collapse_onset(summary), summary["collapse"]
    target, to_step, kept_tokens = newest_checkpoint(run_dir / CHECKPOINTS, before=onset), 0, 0
    if target is not None:
        ledger = Snapshot.of_checkpoint((target / QUEUE_STATE).read_bytes()).queue.ledger
        to_step, kept_tokens = ledger.steps, ledger.trained.tokens
    return {
        "collapsed_at_step": onset,
        "raised_step": collapse["raised_step"],
        "stopped_at_step": summary["steps"],
        "to_step": to_step,
        "lr_before": saved.learner.lr,
        "lr_after": saved.learner.lr / 2,
        "trained_tokens": summary["ledger"]["tokens"]["trained"] - kept_tokens,
        "aside": aside,
        "sentence": collapse["sentence"],
    }


def discard_journal(run_dir: Path) -> None:
    """Puts aside everything later than the newest complete checkpoint, or than the newest from before the collapse that
    stopped the run. Raises ConfigError without one."""
    from asyncrl.learner.checkpoint import CHECKPOINTS, newest_checkpoint, read_manifest

    onset = collapse_onset(read_summary(run_dir))
    newest = newest_checkpoint(run_dir / CHECKPOINTS, before=onset or math.inf)
    if newest is None:
        before = f" from before step {onset}, in which the training began to collapse" if onset else ""
        raise ConfigError(
            f"--discard-journal: {run_dir / CHECKPOINTS} has no complete checkpoint{before}, so there would be nothing "
            "to resume; launch without --resume to start a new run, which moves this one aside"
        )
    put_aside(run_dir, read_manifest(newest).step, next_free_path(run_dir, "journal.discarded-"))


def put_aside(run_dir: Path, step: int, aside: Path) -> None:
    """Moves to `aside` everything after the run's checkpoint of the step, or all of it for step 0: the journal, metrics
    and samples, and newer checkpoints; the trace is copied, since the replay queue cuts it. The queue state of
    the run is the checkpoint's then. When it was interrupted, another call completes it."""
    from asyncrl.learner.checkpoint import CHECKPOINTS, finished_steps, folder_name

    aside.mkdir(exist_ok=True)
    (run_dir / QUEUE_STATE).unlink(missing_ok=True)
    if step:
        replace_file(run_dir / QUEUE_STATE, (run_dir / CHECKPOINTS / folder_name(step) / QUEUE_STATE).read_bytes())
    newer = [f"{CHECKPOINTS}/{folder_name(other)}" for other in finished_steps(run_dir / CHECKPOINTS) if other > step]
    newer += [f"{SAMPLES}/{EVALUATED.format(version)}" for version in evaluated_versions(run_dir) if version > step]
    cut_rows(run_dir / "metrics.jsonl", step or -1, aside)
    cut_rows(run_dir / SAMPLES / TRAINED, step, aside / SAMPLES)
    for trace in run_dir.glob("trace.*"):
        (shutil.copyfile if step else shutil.move)(trace, aside / trace.name)
    for name in [*newer, "journal"]:  # without its journal the run would start from the newest checkpoint
        if (run_dir / name).exists():
            (aside / name).parent.mkdir(exist_ok=True)
            (run_dir / name).rename(aside / name)


def cut_rows(file: Path, step: int, aside: Path) -> None:
    """Moves the rows of steps after `step` to a file of the same name in `aside`, unless that is done already."""
    if all((step_of(line) or 0) <= step for line in read_lines(file)):
        return
    aside.mkdir(exist_ok=True)
    kept = file.with_name(f".{file.name}.new")
    with kept.open("wb") as before, (aside / file.name).open("wb") as after:
        for line in read_lines(file):
            (after if (step_of(line) or 0) > step else before).write(line)
    kept.replace(file)
