"""The batch job of a run on a SLURM cluster: its options, its script and its submission."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

from rich.console import Console

from asyncrl.config import Config
from asyncrl.config.base import Options
from asyncrl.config.placement import Pool
from asyncrl.data.hub import fetch
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.console import EXIT_DONE
from asyncrl.launch.preflight import check_inputs
from asyncrl.launch.run_dir import JOB, check_resume, is_prepared, is_running, nothing_to_resume
from asyncrl.util.files import next_free_path, replace_file
from asyncrl.util.processes import PYTHON

JOB_ID = "SLURM_JOB_ID"
SCRIPT = "job.sh"
NOTICE_S = 300
"""Time before the end of a job at which SLURM sends it SIGUSR1."""
SUBMIT_S = 60.0

FIXED = (
    "array", "chdir", "error", "export", "kill-on-invalid-dep", "no-kill", "ntasks", "ntasks-per-node", "open-mode",
    "output", "parsable", "requeue", "no-requeue", "test-only", "wait", "wrap",
)  # fmt: skip
"""Options that the launcher relies on."""
SIZE = ("nodes", "gpus", "gpus-per-node", "gpus-per-task", "gres")
"""Options that follow from `placement.pools`."""
SHARES = ("cpus-per-task", "exclusive", "oversubscribe", "cpus-per-gpu")
"""With one of them a job does not take its nodes for itself."""
TIMES = ("begin", "deadline", "time", "time-min")
"""Options whose value YAML may read as a number: 12:00:00 is 43200 to it."""
NAME = re.compile(r"[a-z][a-z0-9-]*")
PLAIN = re.compile(r"[\w@%+=:,./\[\]-]+", re.ASCII)


def in_job() -> bool:
    """True inside a SLURM job."""
    return JOB_ID in os.environ


def job_options(config: Config) -> Options:
    """Returns the options of sbatch for a run. Raises ConfigError for one that cannot be used."""
    own = config.launch.slurm
    for name, value in own.items():
        _check_option(name, value, pools=bool(config.placement.pools))
    size = job_size(config.placement.pools)
    if not any(name in {**own, **size} for name in SHARES):
        size["exclusive"] = True
    options: Options = {"job-name": f"asyncrl-{config.run}", **size, "signal": f"B:USR1@{NOTICE_S}", **own}
    output = str(config.run_dir.absolute() / "logs").replace("%", "%%") + "/slurm-%j.out"
    options |= {"ntasks-per-node": 1, "requeue": True, "no-kill": True, "open-mode": "append", "output": output}
    return {name: value for name, value in options.items() if value is not False}


def _check_option(name: str, value: object, *, pools: bool) -> None:
    key = f"launch.slurm.{name} = {value!r}"
    if not NAME.fullmatch(name):
        raise ConfigError(f"{key}: is not an option of sbatch; write its long form without dashes, such as partition")
    if name in FIXED:
        raise ConfigError(f"{key}: the launcher sets --{name} itself; leave it out")
    if pools and name in SIZE:
        raise ConfigError(f"{key}: placement.pools says how many nodes and GPUs there are; leave it out, or the pools")
    if name in TIMES and not isinstance(value, str):
        raise ConfigError(
            f"{key}: YAML reads times with colons as numbers; write days-hours:minutes:seconds, such as 0-12:00:00"
        )
    if name == "signal" and not str(value).startswith("B:USR1@"):
        raise ConfigError(f"{key}: the launcher stops and goes on later at USR1; write B:USR1@SECONDS")
    if value is None or (isinstance(value, str) and (not value or not value.isprintable())):
        raise ConfigError(f"{key}: must be a text on one line, a number, or true for an option without a value")


def job_size(pools: dict[str, Pool]) -> Options:
    """Returns the options for the nodes and GPUs of the pools. Raises ConfigError if one job cannot have them."""
    if not pools:
        return {"nodes": 1}
    kinds = {(pool.gpus, pool.cpus) for pool in pools.values()}
    counts = [pool.nodes for pool in pools.values()]
    gpus, cpus = next(iter(kinds))
    cores: Options = {"cpus-per-task": cpus} if cpus else {}
    if counts == [None]:
        return {"gpus": gpus} | cores
    if len(kinds) > 1 or None in counts:
        raise ConfigError(
            f"placement.pools ({', '.join(pools)}): all nodes of a SLURM job are alike here, so that each of several "
            "pools must have `nodes`, and the same `gpus` and `cpus`"
        )
    per_node: Options = {"gpus-per-node": gpus} if gpus else {}
    return {"nodes": sum(count or 0 for count in counts)} | per_node | cores


def quoted(value: str) -> str:
    """Returns the value as sbatch reads it in a script: in double quotes, in which a backslash takes the next
    character as it is."""
    return value if PLAIN.fullmatch(value) else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def job_script(config: Config) -> str:
    """Returns the batch script of a run, whose config is in `job.yaml` of its folder."""
    lines = ["#!/bin/bash"]
    for name, value in job_options(config).items():
        lines.append(f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={quoted(str(value))}")
    file = config.run_dir.absolute() / JOB
    return "\n".join(
        [
            *lines,
            "",
            "set -euo pipefail",
            f"cd {shlex.quote(str(Path.cwd()))}",
            "# exec: SIGUSR1, which announces the end of the job's time, must reach the launcher.",
            f"exec {shlex.join(PYTHON)} -m asyncrl.cli launch --config {shlex.quote(str(file))} resume=auto",
            "",
        ]
    )


def submit(config: Config, console: Console, *, dry_run: bool = False) -> int:
    """Writes the batch script and the config of a run into its folder, and submits it; with `dry_run` it only shows it.
    Returns the exit code 0.

    Raises ConfigError if the config cannot work or the run exists and cannot be resumed, and RunError if SLURM refuses
    the job.
    """
    config = fetch(config, console)
    script = job_script(config)
    folder = config.run_dir
    if is_running(folder):
        raise ConfigError(f"run = {config.run!r}: a run of this name is running; use another --run")
    if nothing_to_resume(config, console):
        return EXIT_DONE
    resumed = check_resume(config)
    check_inputs(config, console)
    if folder.exists() and not resumed and not is_prepared(folder):
        moved_to = next_free_path(folder.parent, f"{folder.name}.")
        folder.rename(moved_to)
        console.print(f"the earlier run of this name is now {moved_to}", highlight=False)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)  # SLURM does not make it
    replace_file(folder / JOB, config.to_yaml())
    replace_file(folder / SCRIPT, script, mode=0o700)
    if dry_run:
        console.print(script, highlight=False, markup=False, soft_wrap=True)
        console.print(f"not submitted; later: sbatch {shlex.quote(str(folder / SCRIPT))}", highlight=False)
        return 0
    job = _sbatch(folder / SCRIPT)
    for name, text in {
        "job": f"{job}, as squeue -j {job} shows it",
        "output": f"tail -F {shlex.quote(str(folder / 'logs' / f'slurm-{job}.out'))}",
        "stop": f"scancel --batch --signal=INT {job} (after the step); scancel {job} (at once)",
    }.items():
        console.print(f"{name:10} {text}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _sbatch(script: Path) -> str:
    """Submits the script and returns the job's id."""
    command = ["sbatch", "--parsable", str(script)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SUBMIT_S, check=False)
    except FileNotFoundError:
        raise ConfigError(
            "launch.cluster = 'slurm': there is no sbatch on this machine; launch on a node of a SLURM cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(
            f"sbatch did not answer within {SUBMIT_S:g} s; `squeue --me` shows if the job is there"
        ) from None
    if done.returncode:
        raise RunError(f"SLURM refuses the job {script}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
