"""The generator's side of its environment hosts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from asyncrl.config.config import Config
from asyncrl.environments.host import HostSpec, run_host
from asyncrl.errors import RunError
from asyncrl.types import Prompt
from asyncrl.util.processes import HelperContext
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import pack_lists, unpack_lists
from asyncrl.wire.rpc import Connection
from asyncrl.wire.service_messages import (
    EpisodeEnded,
    EpisodeStart,
    HostReply,
    HostRequest,
    NextTurn,
    SampledTurn,
    TurnStatus,
)
from asyncrl.wire.sockets import socket_folder

log = structlog.get_logger()

START_S = 60.0
"""Deadline for a host to start and load its environments."""
SILENCE_S = 5.0
"""A host silent for `environment.step_timeout_s` plus this grace period is considered stuck."""
MAX_STUCK = 8
"""Hung calls after which a host is replaced."""
MAX_FAILED_STARTS = 3
"""Starts in a row of a host that never answered, after which the run cannot continue."""
NO_TOKENS = np.zeros(0, dtype=np.int32)
CLOSE_S = 3.0
"""Deadline for a host to end."""


@dataclass(slots=True)
class _Host:
    """One host process, and the messages to send to it."""

    number: int
    process: BaseProcess
    connection: Connection
    address: Path
    started_s: float
    heard_s: float = 0.0
    """Time of the last message; 0 before the first."""
    stuck: int = 0
    """Its calls that do not return, as last reported."""
    live: set[str] = field(default_factory=set[str])
    """Its episodes."""
    request: HostRequest = field(default_factory=lambda: HostRequest([], [], []))
    """The next message to it, and the tokens of its turns."""
    tokens: list[NDArray[np.int32]] = field(default_factory=list[NDArray[np.int32]])

    def flush(self) -> None:
        """Sends the request, unless it is empty."""
        if self.request != (empty := HostRequest([], [], [])):
            self.connection.send(self.request, pack_lists(self.tokens))
            self.request, self.tokens = empty, []


class EnvironmentPool:
    """`environment.hosts` processes that play the episodes of one generator. Not thread-safe; no method waits.

    A host that dies, or does not answer in time, is started again; its episodes end as failed, by "host".
    """

    def __init__(self, config: Config, *, window_tokens: int, endpoints: Endpoints) -> None:
        """`window_tokens` is the engine's window: prompt, turns and observations together."""
        self._config = config
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(socket_folder())
        self._starts = self._failed_starts = 0
        private = replace(endpoints, keys="")  # it listens in a folder that only this user can enter
        self._spec = HostSpec(config, window_tokens, private, address="")
        self._hosts = [self._start_host(number) for number in range(config.environment.hosts)]
        self._owner: dict[str, _Host] = {}

    @property
    def num_live(self) -> int:
        """Episodes in progress."""
        return len(self._owner)

    def start(self, episode: str, prompt: Prompt, *, seed: int, evaluation: bool) -> None:
        """Starts an episode, in the host with the fewest. `seed` is the seed of its task."""
        host = self._owner[episode] = min(self._hosts, key=lambda host: len(host.live))
        host.live.add(episode)
        host.request.started.append(EpisodeStart(episode, prompt, seed, evaluation))

    def said(
        self, episode: str, tokens: Sequence[int] | NDArray[np.int32], status: TurnStatus, *, branch: int = 0
    ) -> None:
        """Passes on the policy's turn."""
        host = self._owner[episode]
        host.request.turns.append(SampledTurn(episode, branch, status))
        host.tokens.append(np.asarray(tokens, dtype=np.int32))

    def drop(self, episodes: Iterable[str]) -> None:
        """Ends episodes without a result."""
        for episode in episodes:
            host = self._owner.pop(episode, None)
            if host is not None:
                host.live.discard(episode)
                host.request.dropped.append(episode)

    def flush(self) -> None:
        """Sends the collected turns, in one message to each host."""
        for host in self._hosts:
            host.flush()

    def poll(self) -> list[tuple[NextTurn | EpisodeEnded, NDArray[np.int32]]]:
        """Sends the collected turns, and returns the messages that have arrived: requests for a turn, each with the
        observation before it, and ends of episodes. Replaces hosts that have died or are stuck. Raises RunError if a
        host cannot be started."""
        arrived: list[tuple[NextTurn | EpisodeEnded, NDArray[np.int32]]] = []
        self.flush()
        for host in list(self._hosts):
            while (message := host.connection.receive(0.0)) is not None:
                host.connection.check(message)
                body: HostReply = message.body
                self._failed_starts, host.heard_s, host.stuck = 0, time.monotonic(), body.stuck
                says = zip(body.turns, unpack_lists(message, len(body.turns)), strict=True)
                arrived += [(say, observation) for say, observation in says if say.episode in host.live]
                arrived += self._forget(host, [end for end in body.ended if end.episode in host.live])
            if problem := self._problem(host):
                arrived += self._replace(host, problem)
        return arrived

    def close(self) -> None:
        """Ends the hosts; their episodes are lost."""
        for host in self._hosts:
            _end(host)
        self._hosts = []
        self._owner.clear()
        self._stack.close()

    def _problem(self, host: _Host) -> str:
        """Why the host must be replaced; empty if it need not be."""
        if not host.process.is_alive():
            return f"its process ended with exit code {host.process.exitcode}"
        if host.stuck >= MAX_STUCK:
            return f"{host.stuck} calls in its threads do not return"
        silent_s = time.monotonic() - (host.heard_s or host.started_s)
        limit_s = self._config.environment.step_timeout_s + SILENCE_S if host.heard_s else START_S
        if silent_s > limit_s:
            return f"it has not answered for {limit_s:g} s: is an async or `returns_at_once` method blocking?"
        return ""

    def _replace(self, host: _Host, problem: str) -> list[tuple[EpisodeEnded, NDArray[np.int32]]]:
        """Starts another process in place of the host. Returns the ends of its episodes."""
        log.error("environment host replaced", host=host.number, episodes=len(host.live), reason=problem)
        _end(host)
        self._failed_starts += not host.heard_s
        if self._failed_starts == MAX_FAILED_STARTS:
            raise RunError(
                f"environment host {host.number} could not be started {MAX_FAILED_STARTS} times: {problem}; its log is "
                "that of this generator"
            )
        self._hosts[self._hosts.index(host)] = self._start_host(host.number)
        return self._forget(host, [_lost(episode, problem) for episode in sorted(host.live)])

    def _forget(self, host: _Host, ends: list[EpisodeEnded]) -> list[tuple[EpisodeEnded, NDArray[np.int32]]]:
        """Removes episodes that have ended. Returns their ends, without observations."""
        for end in ends:
            host.live.discard(end.episode)
            self._owner.pop(end.episode, None)
        return [(end, NO_TOKENS) for end in ends]

    def _start_host(self, number: int) -> _Host:
        self._starts += 1
        address = self._folder / f"host-{self._starts}"
        spec = replace(self._spec, address=f"ipc://{address}")
        process = HelperContext().Process(
            target=run_host, args=(os.getpid(), spec), name=f"environments-{number}", daemon=True
        )
        process.start()
        connection = Connection(spec.endpoints, spec.address, f"environment host {number}", strict=True)
        connection.send(HostRequest([], [], []))  # to which it answers as soon as it is up
        return _Host(number, process, connection, address, time.monotonic())


def _end(host: _Host) -> None:
    host.connection.close()
    host.process.terminate()
    host.process.join(CLOSE_S)
    if host.process.is_alive():
        host.process.kill()
        host.process.join(CLOSE_S)
    host.address.unlink(missing_ok=True)


def _lost(episode: str, problem: str) -> EpisodeEnded:
    error = f"its environment host was replaced: {problem}"
    return EpisodeEnded(episode, "failed", "host", error=error)
