"""SLURM: the batch job of a run, and the launcher inside it, which starts roles on other nodes as steps by `srun`."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import structlog
from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.config.sections import HostPool, Options
from asyncrl.data.hub import fetch
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.checks import check_inputs
from asyncrl.launch.launcher import HOST_LOST, LocalLauncher, RoleHandle, RoleProcess
from asyncrl.launch.machine import Host, HostFacts, listening_address, own_name, this_machine
from asyncrl.launch.placement import RoleResources
from asyncrl.launch.run_dir import JOB, check_resume, is_prepared, is_running, nothing_to_resume
from asyncrl.launch.worker import EXIT_CRASHED, RoleSpec
from asyncrl.observe.console import EXIT_DONE, say
from asyncrl.util.files import next_free_path, replace_file
from asyncrl.util.processes import PYTHON
from asyncrl.wire.sockets import is_loopback

log = structlog.get_logger()

TOOLS = ("srun", "scontrol", "scancel", "squeue", "sinfo")
STEP = ("srun", "--overlap", "--kill-on-bad-exit=0", "--no-kill", "--cpu-bind=none", "--export=ALL")
BASE = 100
"""Added to the exit codes of roles: smaller ones are those of srun, which ends with 0 when it loses the node."""
CODES = range(BASE, 120)
SIGNALLED = 128
"""Added by a shell, and by srun, to the number of the signal that ended a program."""
CALL_S = 10.0
"""Deadline for an answer of SLURM."""
LOOK_AGAIN_S = 15.0
"""Time between looks at nodes that do not respond."""
LOST = ("down", "fail")
SILENT = "*"
"""The mark that SLURM appends to the state of a node that does not respond."""
NOT_FOR_STEPS = (
    "SLURM_CPUS_PER_TASK", "SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_JOB_NAME",
    "SLURM_NNODES", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_TRES_PER_TASK",
)  # fmt: skip
"""Variables of a job by which srun would ask for as much for each step as the complete job has."""


class SlurmLauncher(LocalLauncher):
    """Starts roles on the nodes of a SLURM job. Outside of one, `asyncrl launch` submits the job."""

    preemptible = True

    def __init__(self) -> None:
        super().__init__()
        self.job = os.environ.get(JOB_ID, "")
        self._hosts: list[Host] = []
        self._gpus: dict[str, str] = {}
        """CUDA_VISIBLE_DEVICES of each role on another node."""
        self._silent: set[str] = set()
        self._lost: set[str] = set()
        self._looked_s = 0.0
        self._look: threading.Thread | None = None

    def acquire(self, config: Config) -> None:
        """the nodes of the job, with the pools in their order."""
        if not in_job():
            raise ConfigError(
                "launch.cluster = 'slurm': this is not inside a SLURM job; `asyncrl launch` submits one, with "
                "--dry-run it shows the script"
            )
        if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
            raise ConfigError(f"launch.cluster = 'slurm': {', '.join(missing)} is not on PATH in job {self.job}")
        names = _call("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
        own = own_name()
        if own not in names:
            raise ConfigError(f"launch.cluster = 'slurm': this host, {own}, is not one of job {self.job}: {names}")
        names = [own, *(name for name in names if name != own)]
        self.address = listening_address(config.launch.host)
        facts = self._facts(config, names[1:]) if len(names) > 1 else []
        if facts and is_loopback(self.address):
            self.address = listening_address(facts[0].head)
        self._hosts = in_pools(config, [this_machine(self.address), *(told.host for told in facts)])

    def _facts(self, config: Config, names: list[str]) -> list[HostFacts]:
        runs = config.run_dir.absolute().parent
        runs.mkdir(parents=True, exist_ok=True)
        token = runs / f".{config.run}-{secrets.token_hex(8)}"
        head = "" if is_loopback(self.address) else config.launch.host
        count = len(names)
        place = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(names)}"]
        command = [*STEP, *place, *PYTHON, "-m", "asyncrl.launch.machine", head, str(token)]
        token.touch(mode=0o600)
        try:
            output = _call(*command, timeout_s=config.launch.start_timeout_s, environment=self.environment())
        finally:
            token.unlink()
        lines = [line for line in output.splitlines() if line.startswith("{")]
        facts = {told.host.name: told for told in (msgspec.json.decode(line, type=HostFacts) for line in lines)}
        if missing := [name for name in names if name not in facts]:
            raise ConfigError(f"launch.cluster = 'slurm': {', '.join(missing)} of job {self.job} did not report")
        if refusals := [told.refusal for told in facts.values() if told.refusal]:
            raise ConfigError(f"launch.cluster = 'slurm': {'; '.join(refusals)}")
        return [facts[name] for name in names]

    def hosts(self) -> list[Host]:
        """A node that does not respond is missing until it does, one that is down for good."""
        is_due = self._silent and time.monotonic() - self._looked_s > LOOK_AGAIN_S
        if is_due and not (self._look and self._look.is_alive()):
            self._look = threading.Thread(target=self._look_at_nodes, name="nodes", daemon=True)
            self._look.start()
        return [host for host in self._hosts if host.name not in self._silent | self._lost] or super().hosts()

    def _look_at_nodes(self) -> None:
        self._looked_s = time.monotonic()
        names = ",".join(host.name for host in self._hosts if host.name)
        try:
            output = _call("sinfo", "--noheader", "--Node", "--format=%N %T", f"--nodes={names}")
        except ConfigError as error:
            log.warning("the states of the nodes are unknown", error=str(error))
            return
        states = dict(line.split() for line in output.splitlines())
        self._lost |= {name for name, state in states.items() if state.startswith(LOST)}
        self._silent = {name for name, state in states.items() if state.endswith(SILENT)}
        if gone := self._silent | self._lost:
            log.warning("nodes are not there", nodes={name: states.get(name, "") for name in sorted(gone)})

    def start(self, spec: RoleSpec, resources: RoleResources) -> RoleProcess:
        """On another node, starts it as a step of the job."""
        self._gpus[spec.name] = resources.environment()["CUDA_VISIBLE_DEVICES"]
        role = super().start(spec, resources)
        if spec.host:
            role.read_code = code_of_step
        return role

    def environment(self) -> dict[str, str]:
        """Returns the environment that roles inherit, without what would make each step as large as the job."""
        return {name: value for name, value in os.environ.items() if name not in NOT_FOR_STEPS}

    def command(self, spec: RoleSpec) -> list[str]:
        """SLURM sets CUDA_VISIBLE_DEVICES of a step to all GPUs of the node, hence env."""
        if not spec.host:
            return super().command(spec)
        place = [f"--nodelist={spec.host}", "--nodes=1", "--ntasks=1", f"--job-name={spec.name}"]
        role = ["env", f"CUDA_VISIBLE_DEVICES={self._gpus[spec.name]}", *PYTHON]
        return [*STEP, *place, *role, "-m", "asyncrl.launch.worker", spec.name, "0", str(BASE)]

    def signal(self, roles: Sequence[RoleProcess], number: signal.Signals) -> None:
        """A signal to srun would kill its role: roles elsewhere get it by scancel."""
        super().signal([role for role in roles if not role.spec.host], number)
        elsewhere = [role for role in roles if role.spec.host and role.code is None]
        if elsewhere:
            self._look_at_nodes()  # scancel would wait for one that is not there
        names = {role.spec.name for role in elsewhere if role.spec.host not in self._silent | self._lost}
        if not names:
            return
        try:
            steps = _call("squeue", "--noheader", "--steps", f"--jobs={self.job}", "--format=%i %j")
            pairs = [line.split(maxsplit=1) for line in steps.splitlines() if line.strip()]
            found = [step for step, name in pairs if name in names]
            if found:  # scancel also complains of steps that the signal has ended
                _call("scancel", f"--signal={number.name.removeprefix('SIG')}", *found, may_fail=True)
        except ConfigError as error:
            log.warning("roles were not signalled", signal=number.name, names=sorted(names), error=str(error))

    def kill(self, roles: Sequence[RoleHandle], *, show_stacks: bool = False) -> list[RoleHandle]:
        """the end of srun ends its role. Then it looks which nodes are there for the next start."""
        left = super().kill(roles, show_stacks=show_stacks)
        if any(role.spec.host for role in roles):
            self._look_at_nodes()
        return left

    def requeue(self) -> None:
        log.info("the job is put into the queue again", job=self.job)
        try:
            _call("scontrol", "requeue", self.job)
        except ConfigError as error:
            raise RunError(f"job {self.job} cannot go on later ({error}); submit its script again") from None

    def describe(self) -> dict[str, str]:
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        nodes = ", ".join([own_name(), *(host.name for host in self._hosts if host.name)])
        log.info("SLURM job", job=self.job, nodes=nodes, restarts=int(restarts))
        return {"job": f"{self.job} on {nodes}" + (f", start {int(restarts) + 1}" if restarts != "0" else "")}


def in_pools(config: Config, hosts: Sequence[Host]) -> list[Host]:
    """Returns the hosts with their pools: each pool gets its nodes in the order of the config. Raises ConfigError if a
    pool lacks nodes or GPUs."""
    left, placed = list(hosts), list[Host]()
    for name, pool in config.placement.pools.items():
        count = pool.nodes or len(left)
        own, left = left[:count], left[count:]
        placed += [replace(host, pool=name) for host in own]
        gpus = [len(host.gpus) for host in own]
        if len(own) < count or (min(gpus) < pool.gpus if pool.nodes else sum(gpus) < pool.gpus):
            raise ConfigError(
                f"placement.pools.{name}: {count} nodes with {pool.gpus} GPUs {'each' if pool.nodes else 'in all'} are "
                f"asked for; the job has {len(own)} for it, with {gpus} GPUs; submit it again"
            )
    return placed or left


def code_of_step(code: int) -> int:
    """Returns the exit code of a role from its srun's."""
    if code in CODES:
        return code - BASE
    if code == 0:
        return HOST_LOST
    if code - SIGNALLED in set(signal.Signals):
        return SIGNALLED - code
    return code if code < 0 else EXIT_CRASHED


def _call(
    *command: str, timeout_s: float = CALL_S, environment: dict[str, str] | None = None, may_fail: bool = False
) -> str:
    """Returns the output of a command of SLURM. Raises ConfigError if it fails or does not answer."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} did not answer within {timeout_s:g} s") from None
    if done.returncode and not may_fail:
        raise ConfigError(f"{command[0]} failed: {done.stderr.strip() or f'code {done.returncode}'}")
    return done.stdout


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


def job_size(pools: dict[str, HostPool]) -> Options:
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
        say(console, f"the earlier run of this name is now {moved_to}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)  # SLURM does not make it
    replace_file(folder / JOB, config.to_yaml())
    replace_file(folder / SCRIPT, script, mode=0o700)
    if dry_run:
        say(console, script)
        say(console, f"not submitted; later: sbatch {shlex.quote(str(folder / SCRIPT))}")
        return 0
    job = _sbatch(folder / SCRIPT)
    for name, text in {
        "job": f"{job}, as squeue -j {job} shows it",
        "output": f"tail -F {shlex.quote(str(folder / 'logs' / f'slurm-{job}.out'))}",
        "stop": f"scancel --batch --signal=INT {job} (after the step); scancel {job} (at once)",
    }.items():
        say(console, f"{name:10} {text}")
    return 0


def _sbatch(script: Path) -> str:
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
