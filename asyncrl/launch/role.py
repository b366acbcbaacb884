"""One role process: `python -m asyncrl.launch.role SPEC`, started by a launcher."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import structlog

from asyncrl.config import Config, load_config
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.observe.logs import configure_logs
from asyncrl.processes import end_with_parent
from asyncrl.types import Endpoints

log = structlog.get_logger()

SHOW_STACKS = signal.SIGUSR1
"""Has a role write where all its threads are to its `.out` file."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """What a role process must know; its config is the run folder's `config.yaml`."""

    role: str
    index: int
    run_dir: str
    endpoints: Endpoints
    cpus: tuple[int, ...]
    prompt_tokens: int
    """Longest prompt that fits the model's window."""

    @property
    def name(self) -> str:
        return self.role if self.role in ("replay", "reward_model") else f"{self.role}-{self.index}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        ends = values.pop("endpoints")
        for name in ("weights", "learners"):
            ends[name] = tuple(ends[name])
        ends["critics"] = tuple(tuple(address) for address in ends["critics"])
        endpoints = Endpoints(**ends)
        return cls(**values, endpoints=endpoints)


def run_replay_role(config: Config, spec: RoleSpec, should_stop: Callable[[], bool]) -> None:
    from asyncrl.data.cursor import PromptCursor
    from asyncrl.data.prompts import eval_prompts
    from asyncrl.replay.queue import ReplayQueue
    from asyncrl.replay.server import run_replay
    from asyncrl.replay.trace import TraceWriter

    prompts = PromptCursor(config, limit_tokens=spec.prompt_tokens)
    evaluated = eval_prompts(config, limit_tokens=spec.prompt_tokens)
    queue = ReplayQueue(config, prompts, TraceWriter(Path(spec.run_dir) / "trace.parquet"), evaluated)
    run_replay(queue, spec.endpoints, should_stop)


def run_generator_role(config: Config, spec: RoleSpec, should_stop: Callable[[], bool]) -> None:
    from asyncrl.generator.loop import run_generator

    run_generator(
        config, index=spec.index, endpoints=spec.endpoints, run_dir=Path(spec.run_dir), should_stop=should_stop
    )


def run_learner_role(config: Config, spec: RoleSpec, should_stop: Callable[[], bool]) -> None:
    from asyncrl.learner.loop import run_learner

    run_learner(config, rank=spec.index, endpoints=spec.endpoints, run_dir=Path(spec.run_dir), should_stop=should_stop)


def run_critic_role(config: Config, spec: RoleSpec, should_stop: Callable[[], bool]) -> None:
    from asyncrl.learner.remote_critic import run_critic

    run_critic(config, rank=spec.index, endpoints=spec.endpoints, should_stop=should_stop)


def run_reward_model_role(config: Config, spec: RoleSpec, should_stop: Callable[[], bool]) -> None:
    from asyncrl.rewards.model_server import run_reward_model

    run_reward_model(config, endpoints=spec.endpoints, should_stop=should_stop)


ROLES: dict[str, Callable[[Config, RoleSpec, Callable[[], bool]], None]] = {
    "reward_model": run_reward_model_role,
    "replay": run_replay_role,
    "generator": run_generator_role,
    "learner": run_learner_role,
    "critic": run_critic_role,
}


def main(argv: list[str]) -> int:
    """Runs the role; 0 when it ended as it should, 1 with the cause as the last error in its log."""
    spec, parent = RoleSpec.from_json(argv[0]), int(argv[1])
    end_with_parent(parent)
    os.sched_setaffinity(0, spec.cpus)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(SHOW_STACKS)
    run_dir = Path(spec.run_dir)
    config = load_config(run_dir / "config.yaml")
    configure_logs(run_dir, spec.name, config.observe.log_level)
    log.info("started", pid=os.getpid(), cpus=spec.cpus)
    try:
        ROLES[spec.role](config, spec, stop.is_set)
    except AsyncrlError as error:
        log.error("failed", error=str(error), kind=type(error).__name__, exc_info=True)
        return 2 if isinstance(error, ConfigError) else 1
    except Exception as error:  # the last line of defense: whatever it was, the log must say it
        log.error("crashed", error=f"{type(error).__name__}: {error}", exc_info=True)
        return 1
    log.info("ended")
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
