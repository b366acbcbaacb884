"""One role process: `python -m asyncrl.launch.worker NAME LAUNCHER [BASE]`, started by a launcher.

It reads its RoleSpec from standard input, since the run id is a credential and every user of the machine can read the
arguments of a process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.errors import AsyncrlError, ConfigError, DataError, PeerTimeoutError, is_disk_full
from asyncrl.launch.machine import network_environment
from asyncrl.observe.logs import configure_logs
from asyncrl.util.model_files import replayed_routers
from asyncrl.util.processes import end_with_parent, raise_file_limit, tune_gc
from asyncrl.wire.endpoints import Endpoints

log = structlog.get_logger()

MAX_EPISODE_TURNS = 4096
"""Turns of an episode, with those of failed tries, whose lost tokens the replay queue accepts."""
MIN_SEGMENTS = 16
"""Minimum number of journal segments within `journal.max_bytes`."""
SHOW_STACKS = signal.SIGUSR1
"""Makes a role write the stacks of all its threads to its `.out` file."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """The inputs of a role process."""

    role: str
    index: int
    run_dir: str
    endpoints: Endpoints
    cpus: tuple[int, ...]
    prompt_tokens: int
    """Longest prompt that fits the model's window."""
    group_relative: bool = True
    """True if the advantage of a group whose rewards are all equal is 0."""
    greedy_baseline: bool = False
    """True if every training group has, in addition to its trajectories, a greedy completion that is scored but not
    trained."""
    start: int = 0
    """Number of earlier starts of the role in this run."""
    checkpoint: str = ""
    """File with the initial state of the replay queue if there is no journal; empty for none."""
    offline: str = ""
    """Folder of an offline training from a journal, with its own config and logs; empty in a run."""
    offline_step: int = 0
    """Step of the checkpoint from which an offline training starts; 0 for the model."""
    offline_samples: str = ""
    """File of the samples that an offline training trains; empty for the batches of the journal."""
    host: str = ""
    """Name of the host that it runs on; empty for the launcher's own."""

    @property
    def home(self) -> Path:
        """The folder with the role's `config.yaml` and `logs/`."""
        return Path(self.offline or self.run_dir)

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def name(self) -> str:
        return self.role if self.role in ("replay", "reward_model") else f"{self.role}-{self.index}"

    @property
    def label(self) -> str:
        """The name for people: `generator-1`, on another host than the launcher's `generator-1@n2`."""
        return f"{self.name}@{self.host}" if self.host else self.name


def _run_replay(config: Config, spec: RoleSpec, should_stop: Callable[[], bool]) -> None:
    from asyncrl.data.cursor import PromptCursor
    from asyncrl.data.prompts import eval_prompts
    from asyncrl.observe.trace import TraceWriter
    from asyncrl.replay.codec import MAX_INT32, GroupLimits, max_group_header_bytes
    from asyncrl.replay.journal import SEGMENT_BYTES, Journal
    from asyncrl.replay.queue import ReplayQueue
    from asyncrl.replay.server import Directory, run_replay
    from asyncrl.util.model_files import num_embeddings

    run_dir, run_id, generator = Path(spec.run_dir), spec.endpoints.run_id, config.generator
    prompts = PromptCursor(config, limit_tokens=spec.prompt_tokens)
    # A fraction of the limit, since only complete segments can be deleted.
    segment_bytes = min(SEGMENT_BYTES, config.journal.max_bytes // MIN_SEGMENTS)
    # An episode may have several rows, and be longer: `data.max_prompt_tokens` limits its first prompt only.
    played, window_tokens = config.environment.name is not None, spec.prompt_tokens + generator.max_new_tokens
    queue = ReplayQueue(
        config,
        prompts,
        TraceWriter(run_dir / "trace.parquet"),
        eval_prompts(config, limit_tokens=spec.prompt_tokens),
        Journal(run_dir / "journal", flush=config.journal.flush, segment_bytes=segment_bytes),
        run_id,
        Path(spec.checkpoint).read_bytes() if spec.checkpoint else b"",
        group_relative=spec.group_relative,
        limits=GroupLimits(
            num_embeddings(config.model.path) or MAX_INT32 + 1,
            MAX_INT32 if played else window_tokens,
            max_group_header_bytes(config.replay.groups_per_step),
            (MAX_EPISODE_TURNS if played else 1) * generator.group_size * generator.max_new_tokens,
        ),
    )
    prompts.start()  # while generators start
    routers = replayed_routers(
        config.algorithm.routing_replay, config.model.path, trust_remote_code=config.model.trust_remote_code
    )
    tune_gc()
    run_replay(
        queue,
        spec.endpoints,
        should_stop,
        max_group_tokens=None if played else generator.group_size * window_tokens,
        routing_bytes=0 if routers is None else routers.token_bytes,
        samples_dir=run_dir if config.observe.samples else None,
        directory=Directory(run_dir / "addresses.json", run_id),
    )


def _run_generator(config: Config, spec: RoleSpec, should_stop: Callable[[], bool]) -> None:
    from asyncrl.generator.role import run_generator

    run_generator(
        config,
        index=spec.index,
        endpoints=spec.endpoints,
        run_dir=Path(spec.run_dir),
        should_stop=should_stop,
        start=spec.start,
        greedy_baseline=spec.greedy_baseline,
    )


def _run_learner(config: Config, spec: RoleSpec, should_stop: Callable[[], bool]) -> None:
    from asyncrl.learner.role import run_learner, run_offline

    run_dir = Path(spec.run_dir)
    if not spec.offline:
        run_learner(config, rank=spec.index, endpoints=spec.endpoints, run_dir=run_dir, should_stop=should_stop)
        return
    run_offline(
        config,
        rank=spec.index,
        endpoints=spec.endpoints,
        run_dir=run_dir,
        out_dir=Path(spec.offline),
        should_stop=should_stop,
        start=spec.offline_step,
        samples=Path(spec.offline_samples) if spec.offline_samples else None,
    )


def _run_critic(config: Config, spec: RoleSpec, should_stop: Callable[[], bool]) -> None:
    from asyncrl.learner.critic import run_critic

    run_critic(
        config,
        rank=spec.index,
        endpoints=spec.endpoints,
        run_dir=Path(spec.run_dir),
        out_dir=spec.home,
        should_stop=should_stop,
    )


def _run_reward_model(config: Config, spec: RoleSpec, should_stop: Callable[[], bool]) -> None:
    from asyncrl.rewards.model_server import run_reward_model

    run_reward_model(config, endpoints=spec.endpoints, should_stop=should_stop)


ROLES: dict[str, Callable[[Config, RoleSpec, Callable[[], bool]], None]] = {
    "reward_model": _run_reward_model,
    "replay": _run_replay,
    "generator": _run_generator,
    "learner": _run_learner,
    "critic": _run_critic,
}
"""Each runs one process of the role until the run ends or the function returns True."""

EXIT_FAILED, EXIT_CONFIG, EXIT_SILENT_PEER, EXIT_CRASHED, EXIT_DISK_FULL, EXIT_TERMINATED = 1, 2, 3, 4, 5, 6
FINAL_CODES = (EXIT_FAILED, EXIT_CONFIG, EXIT_DISK_FULL)
"""Exit codes of errors that a restart would repeat."""


def main(argv: list[str]) -> int:
    """Runs the role of the spec on standard input, which must be closed. The arguments are the role's name, which is
    only shown in process lists, the launcher's process id, 0 if it is not the parent, and the number that is added to
    exit codes, so that they differ from those of a program in between. Returns the exit code of `run_role`."""
    spec = read_spec()
    parent, base = (int(argument) for argument in (*argv[1:], "0")[:2])
    return base + run_role(spec, parent)


def read_spec() -> RoleSpec:
    """Returns the spec from standard input and redirects standard input to /dev/null. Raises ConfigError if it is not a
    spec."""
    text = sys.stdin.buffer.read()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    try:
        return msgspec.json.decode(text, type=RoleSpec)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"no role spec on standard input ({error}); roles are started by asyncrl launch") from None


def run_role(spec: RoleSpec, parent: int) -> int:
    """Runs the role in this process, which ends with the process `parent` unless that is 0. Returns 0 if the role ended
    normally, otherwise one of the codes above, with the cause as the last error in its log."""
    if parent:
        end_with_parent(parent)
    raise_file_limit()
    if spec.cpus:
        os.sched_setaffinity(0, spec.cpus)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(SHOW_STACKS)
    config = load_config(spec.home / "config.yaml")
    configure_logs(spec.home, spec.name, host=spec.host)
    log.info("started", pid=os.getpid(), cpus=spec.cpus, start=spec.start)
    try:
        os.environ.update(network_environment(spec.endpoints.host))
        ROLES[spec.role](config, spec, stop.is_set)
    except AsyncrlError as error:
        log.error("failed", error=str(error), kind=type(error).__name__, exc_info=True)
        return exit_code(error)
    except Exception as error:  # any error must be in the log
        log.error("crashed", error=f"{type(error).__name__}: {error}", exc_info=True)
        return EXIT_DISK_FULL if is_disk_full(error) else EXIT_CRASHED
    if stop.is_set():
        log.error("ended", error="stopped by SIGTERM")
        return EXIT_TERMINATED
    log.info("ended")
    return 0


def exit_code(error: AsyncrlError) -> int:
    """Returns the exit code, by which the launcher decides whether to restart the role."""
    if is_disk_full(error):
        return EXIT_DISK_FULL  # checked first, since the log may be incomplete then
    if isinstance(error, ConfigError | DataError):
        return EXIT_CONFIG
    return EXIT_SILENT_PEER if isinstance(error, PeerTimeoutError) else EXIT_FAILED


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
