"""The run's folder: one live run at a time; an earlier one of the same name is resumed or moved aside."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import msgspec
from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.config.load import config_keys, load_config
from asyncrl.config.sections import MappingValue
from asyncrl.errors import ConfigError
from asyncrl.launch.machine import Host, find_port, listening_address
from asyncrl.observe.collapse import read_rollbacks
from asyncrl.observe.console import say
from asyncrl.util.files import next_free_path, read_json, replace_file
from asyncrl.util.locks import is_locked, try_lock
from asyncrl.util.text import redact, redact_named
from asyncrl.wire.endpoints import NAMED, Endpoints
from asyncrl.wire.sockets import IPC, is_loopback, new_keys, socket_folder

RUN_ID_BYTES = 16
"""Random bytes: knowledge of the run id authenticates a process as part of the run."""
ENDPOINTS = "endpoints.json"
JOB = "job.yaml"
"""The config of a run's batch job, next to its script."""
HOSTS = "hosts.json"
"""File with the hosts that the latest launch started with."""
ATTEMPTS = "attempts.json"
"""File with the wall time in seconds of each earlier launch of a resumed run."""
FILE = "fingerprints.json"
"""File of the run folder with the fingerprints of its latest launch's training data."""
ROWS = "data.train"
ACCEPTED = "accepted"
"""Key of the file that is set when other training rows are accepted."""
COMPLETE_BYTES = 64 << 20
"""Larger files are read in part."""
BLOCKS, BLOCK_BYTES = 64, 1 << 16
"""Parts that are read of a larger file: the first, the last and others at equal distances."""
Fingerprints = list[list[str]]
"""The name and the fingerprint of each file."""
FREE_SECTIONS = ("launch", "placement", "observe", "weights", "checkpoint", "journal")
FREE_KEYS = {
    "steps", "resume", "run", "runs_dir", "eval.every_steps", "data.workers",
    "generator.max_running_groups", "generator.reward_workers", "generator.reward_timeout_s",
    "generator.kv_cache_bytes", "generator.gpu_memory_utilization", "generator.tensor_parallel",
    "generator.engine_options",
    "replay.max_bytes",
    "learner.tokens_per_microbatch", "learner.gradient_checkpointing", "learner.deepspeed_options",
    "learner.offload", "learner.sequence_parallel", "learner.lora.load",
    "learner.lr", "critic.lr", "learner.max_grad_norm",
    "learner.on_collapse",
}  # fmt: skip
"""Settings that may change when a run is resumed. The objective and the data must stay. The size of an update may
change, since that is the remedy for updates that are not finite. Then the steps since the newest checkpoint, which are
trained again, have other results than before. That is sound: tokens sampled since then keep the log-probs of the policy
that sampled them, and generators of a resumed run start with the new weights."""
ENGINE_OPTIONS = "generator.engine_options"
FIXED_KEYS = {f"{ENGINE_OPTIONS}.max_model_len"}
"""Settings of free sections and keys that may not change: the window decides which prompts are skipped."""


class RunFolder:
    """Holds the lock on `runs/<name>` during the run. Use as a context manager.

    Raises ConfigError when another launch holds the lock, or when the run cannot be resumed as `resume` demands.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.path = config.run_dir
        self.moved_to: Path | None = None
        """New path of the earlier run of this name; None when there was none or it is resumed."""
        self.earlier_s: list[float] = []
        """Wall time of each earlier launch of this run."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.fdopen(os.open(lock_path(self.path), os.O_RDWR | os.O_CREAT, 0o600), "r+")
        except OSError as error:
            raise ConfigError(
                f"run = {config.run!r}: {self.path.parent.absolute()} cannot hold the run's folder: {error.strerror}; "
                "launch from a folder in which you may write, or set runs_dir"
            ) from None

    def __enter__(self) -> Self:
        if not try_lock(self._lock.fileno(), lock_path(self.path)):
            holder = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise ConfigError(
                f"run = {self.path.name!r}: a run of this name is running (process {holder}); use another --run"
            )
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        try:
            self._prepare()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _prepare(self) -> None:
        if check_resume(self.config):
            self.earlier_s = _attempts_s(self.path)
        elif self.path.exists() and not is_prepared(self.path):
            self.moved_to = next_free_path(self.path.parent, f"{self.path.name}.")
            self.path.rename(self.moved_to)
        self.path.mkdir(mode=0o700, exist_ok=True)  # prompts, completions and logs are the user's own

    def __exit__(self, *_: object) -> None:
        (self.path / ENDPOINTS).unlink(missing_ok=True)
        self._lock.truncate(0)
        self._lock.close()

    def begin(self, config: Config, endpoints: Endpoints, hosts: Sequence[Host]) -> None:
        """Writes the config, the endpoints and the hosts of a launch, and removes the summary of an earlier one: then
        a rollback that it asks for is done."""
        if self.earlier_s:
            replace_file(self.path / ATTEMPTS, json.dumps(self.earlier_s) + "\n")
        replace_file(self.path / FILE, json.dumps({ROWS: fingerprints(config)}, indent=2) + "\n")
        # A config that is used again starts a new run, whatever started this one.
        saved = config.model_copy(update={"resume": "never"}) if config.resume == "must" else config
        replace_file(self.path / "config.yaml", saved.to_yaml())
        (self.path / "summary.json").unlink(missing_ok=True)
        replace_file(self.path / HOSTS, json.dumps([asdict(host) for host in hosts], indent=2) + "\n")
        replace_file(self.path / ENDPOINTS, json.dumps(asdict(endpoints), indent=2) + "\n", mode=0o600)

    def summary(self, summary: dict[str, Any]) -> dict[str, Any]:
        """The summary with the wall time of all launches of this run; secrets are shown as ***."""
        wall_s, attempts = summary["wall_s"] + sum(self.earlier_s), len(self.earlier_s) + 1
        rollbacks = {"rollbacks": done} if (done := read_rollbacks(self.path)) else {}
        return redact(summary) | {"wall_s": wall_s, "attempts": attempts} | rollbacks

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replaces `summary.json` atomically."""
        replace_file(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")


def is_prepared(run_dir: Path) -> bool:
    """True for a folder with the job of a run that has not begun."""
    return (run_dir / JOB).is_file() and not (run_dir / "config.yaml").is_file()


def lock_path(run_dir: Path) -> Path:
    """The lock file of a run, next to its folder. It stays: another launcher may have opened it to lock it next."""
    return run_dir.parent / f".{run_dir.name}.lock"


def is_running(run_dir: Path) -> bool:
    """True while a launcher holds the run's lock."""
    try:
        with lock_path(run_dir).open() as lock:
            return is_locked(lock.fileno(), lock_path(run_dir))
    except FileNotFoundError:
        return False


def read_endpoints(run_dir: Path) -> Endpoints:
    """The addresses of a live run. Raises ConfigError when the run is unknown or not running."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: there is no such run")
    file = run_dir / ENDPOINTS
    if not is_running(run_dir) or not file.exists():
        raise ConfigError(f"{run_dir}: this run is not running; start it with asyncrl launch, or resume it (--resume)")
    return msgspec.convert(read_json(file), Endpoints)


def read_hosts(run_dir: Path) -> list[Host]:
    """The hosts that the run's latest launch started with."""
    return msgspec.convert(read_json(run_dir / HOSTS, kind=list), list[Host])


def _attempts_s(run_dir: Path) -> list[float]:
    file = run_dir / ATTEMPTS
    earlier_s: list[float] = read_json(file, kind=list) if file.exists() else []
    summary = run_dir / "summary.json"
    if summary.exists():
        return [*earlier_s, read_json(summary)["wall_s"] - sum(earlier_s)]
    began_s = (run_dir / "config.yaml").stat().st_mtime
    written = [*run_dir.glob("logs/*.jsonl"), *run_dir.glob("metrics.jsonl")]
    last_s = max((path.stat().st_mtime for path in written), default=began_s)
    return [*earlier_s, max(0.0, last_s - began_s)]


def free_in_resume(key: str) -> bool:
    """True if the setting may change when a run is resumed."""
    section, name, *_ = (*key.split("."), "")
    is_free = section in FREE_SECTIONS or bool({key, f"{section}.{name}"} & FREE_KEYS)
    return is_free and key not in FIXED_KEYS


def changes(saved: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values, `option_keys` and the engine's options included."""
    before, after = _values(saved), _values(config)
    pairs = {key: (before.get(key), after.get(key)) for key in [*before, *(after.keys() - before.keys())]}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def refuse_changes(saved: Config, config: Config, allowed: Callable[[str], bool], *, what: str, hint: str) -> None:
    """Raises ConfigError that lists every setting that differs and may not."""
    wrong = {key: pair for key, pair in changes(saved, config).items() if not allowed(key)}
    if wrong:
        pairs = {key: [redact_named(key, value) for value in pair] for key, pair in wrong.items()}
        lines = [f"{key}: it was {before!r}, now {now!r}" for key, (before, now) in pairs.items()]
        raise ConfigError(f"{what}:\n  " + "\n  ".join(lines) + f"\n{hint}")


def check_resume(config: Config) -> bool:
    """True if the earlier run of this name is resumed, False if a new one starts.

    Raises ConfigError when `resume` is "must" and no run can be resumed, or when a setting or training rows differ that
    may not.
    """
    file = config.run_dir / "config.yaml"
    if config.resume == "never" or (config.resume != "must" and not file.is_file()):
        return False
    saved = load_config(config_of_run(config.run, config.runs_dir))
    config = config.with_choices_of(saved)
    if steps := finished_steps(config):
        raise ConfigError(
            f"run = {config.run!r}: it has finished its {steps} steps, there is nothing to resume; raise --steps to "
            "train on"
        )
    refuse_changes(
        saved,
        config,
        free_in_resume,
        what=f"run = {config.run!r} cannot be resumed with other settings than it was started with",
        hint="restore them, or start another run with --run NAME and without --resume",
    )
    if changed := changed_rows(config.run_dir, config):
        raise ConfigError(
            f"{ROWS}: {', '.join(changed)} has other content than when the run was last started, and the "
            "run refers to its rows by number; restore it, continue with the new rows (--accept-data), or start a new "
            "run without --resume"
        )
    return True


def finished_steps(config: Config) -> int:
    """The steps of the earlier run of this name if it has done all steps of the config; 0 if it has not."""
    summary = read_summary(config.run_dir)
    steps = summary.get("steps", 0)
    return steps if summary.get("status") == "finished" and steps >= config.steps else 0


def nothing_to_resume(config: Config, console: Console) -> bool:
    """True, and printed, if the run has finished and `resume` is "auto": a scheduler repeats the command."""
    if config.resume != "auto" or not (steps := finished_steps(config)):
        return False
    say(console, f"{config.run_dir} has finished its {steps} steps; raise --steps to train on")
    return True


def config_of_run(name: str, runs_dir: str) -> Path:
    """The config file that a run was started with. Raises ConfigError for an unknown run."""
    file = Path(runs_dir) / name / "config.yaml"
    if not file.is_file():
        known = sorted(other.parent.name for other in Path(runs_dir).glob("*/config.yaml"))
        raise ConfigError(
            f"run = {name!r}: there is no such run to resume in {Path(runs_dir)}/ (of {', '.join(known) or 'none'}); "
            "name one with --run, or launch without --resume"
        )
    return file


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The summary of the run's latest launch; empty if it has not ended or was killed."""
    file = run_dir / "summary.json"
    return read_json(file) if file.is_file() else {}


def _values(config: Config) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in config_keys():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        inner = config.generator.engine_settings if key == ENGINE_OPTIONS else {}
        inner = dict(value) if isinstance(value, MappingValue) else inner
        values |= {f"{key}.{name}": option for name, option in inner.items()} or {key: value}
    return values


def fingerprints(config: Config) -> Fingerprints:
    """Returns those of the training data. Names are without their folders, so that a copied folder has the same ones;
    files that do not exist are left out."""
    return [[file.name, fingerprint(file)] for file in map(Path, config.data.train_files) if file.is_file()]


def fingerprint(path: Path) -> str:
    """Returns the size of a file, and a hash of its content or, if it is large, of parts of it."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        if size <= COMPLETE_BYTES:
            digest.update(file.read())
        else:
            for number in range(BLOCKS):
                file.seek((size - BLOCK_BYTES) * number // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return f"{size}-{digest.hexdigest()[:32]}"


def changed_rows(run_dir: Path, config: Config) -> list[str]:
    """Returns the name of each file of training rows that has changed, is new or is missing since the run's latest
    launch; none if another launch is to accept that."""
    saved = read_json(run_dir / FILE) if (run_dir / FILE).is_file() else {}
    if ROWS not in saved or saved.get(ACCEPTED):
        return []
    differing = {tuple(entry) for entry in fingerprints(config)} ^ {tuple(entry) for entry in saved[ROWS]}
    return sorted({name for name, _ in differing})


def accept_rows(run_dir: Path) -> None:
    """Has the next launch continue with other training rows."""
    if (run_dir / FILE).is_file():
        replace_file(run_dir / FILE, json.dumps(read_json(run_dir / FILE) | {ACCEPTED: True}, indent=2) + "\n")


@contextmanager
def run_endpoints(config: Config, *, host: str = "", reward_model: bool = False) -> Iterator[Endpoints]:
    """Yields addresses for all roles of a run, with a new run id; valid inside the block. `host` is the address of the
    launcher's own host, by default that of `launch.address`.

    On a loopback address, ZeroMQ uses unix sockets in a folder that only this user can enter; on any other one it uses
    ports, encrypted with new keys. The port of the replay queue is chosen here, the other roles' by the roles
    (`wire/rpc.py`). Raises ConfigError when the host cannot be bound, when a port is taken or has no effect, and
    when the socket folder cannot be created.
    """
    host, port = listening_address(host or config.launch.host), config.launch.port
    critics = [f"critic-{rank}" for rank in range(config.critic.ranks)]
    names = ["replay", "weights", "learners", *critics]
    names += ["critic-ranks"] if critics else []
    names += ["reward-model"] if reward_model else []
    with ExitStack() as stack:
        if is_loopback(host):
            if port:
                raise ConfigError(
                    f"launch.address = {config.launch.address!r}: a port has no effect on a loopback address, where "
                    "the roles listen on unix sockets; leave it out, or use an address that other machines reach"
                )
            folder, keys = str(stack.enter_context(socket_folder())), ""
            addresses = {name: f"{IPC}{folder}/{name}" for name in names}
        else:
            folder, keys = "", new_keys()
            addresses = {name: f"{NAMED}{name}" for name in names}
            addresses["replay"] = f"tcp://{host}:{find_port(port, host=host)}"
        yield Endpoints(
            f"{config.run}-{secrets.token_hex(RUN_ID_BYTES)}",
            replay=addresses["replay"],
            weights=addresses["weights"],
            learners=addresses["learners"],
            host=host,
            reward_model=addresses.get("reward-model", ""),
            critics=tuple(addresses[name] for name in critics),
            critic_ranks=addresses.get("critic-ranks", ""),
            folder=folder,
            keys=keys,
        )
