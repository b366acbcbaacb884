"""An environment host: a process that plays many episodes at once for one generator.

    main thread       an event loop. Woken by messages of the generator, by environments that return, and every BEAT_S,
                      when it sends a sign of life
    other threads     methods that are neither async nor return at once; one for each call that waits

A method that blocks the event loop blocks all episodes of the host: the generator, which then receives nothing, ends
the host and starts another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.config.config import Config
from asyncrl.environments.dialogue.dialogue import Dialogue
from asyncrl.environments.episode import Limits, PolicyTurn
from asyncrl.environments.gateway.gateway import Gateway
from asyncrl.environments.player import Player
from asyncrl.environments.programs.program_player import ProgramPlayer
from asyncrl.environments.table import EnvironmentTable, Named
from asyncrl.util.processes import become_helper, tune_gc
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import Array, Message, pack_lists, unpack_lists
from asyncrl.wire.rpc import Reply, Server
from asyncrl.wire.service_messages import EpisodeEnded, EpisodeStart, HostReply, HostRequest, NextTurn

BEAT_S = 1.0
"""Interval of signs of life."""
MAX_SAYS = 32
"""Turns that are requested in one message, so that the first ones do not wait for what many episodes do at once."""
MAX_THREADS = 1024
"""Calls that may wait at once."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """The settings of a host."""

    config: Config
    window_tokens: int
    """The engine's window: prompt, turns and observations together."""
    endpoints: Endpoints
    address: str
    """The address at which it listens."""


def run_host(parent: int, spec: HostSpec) -> None:
    """Makes this process a host, which ends with `parent`. Raises ConfigError if the environments cannot be loaded."""
    become_helper(parent)
    host = EnvironmentHost(spec)
    tune_gc()
    asyncio.run(host.serve())


class EnvironmentHost:
    """Plays the episodes of one generator."""

    def __init__(self, spec: HostSpec) -> None:
        """Loads environments and tokenizer. Raises ConfigError."""
        config = spec.config
        settings = config.environment
        assert settings.name is not None
        self._limits = Limits.of(config, window_tokens=spec.window_tokens)
        self._keeps_messages = config.has_reward_functions
        self._table = EnvironmentTable(settings.name, settings.options, python=settings.python)
        self._dialogue = Dialogue.of(config)
        self._threads = ThreadPoolExecutor(MAX_THREADS, "environment")
        self._server = Server(
            spec.endpoints,
            spec.address,
            "environment host",
            {HostRequest: self._handle},
        )
        self._generator = b""
        self._gateway = Gateway()
        self._players: dict[str, Player | ProgramPlayer] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stuck: set[asyncio.Future[Any]] = set()
        """Calls in threads that did not return in time, and still run."""
        self._says: list[tuple[NextTurn, Array]] = []
        self._ended: list[EpisodeEnded] = []
        self._flush_due = False
        self._failure: BaseException | None = None

    async def serve(self) -> None:
        """Serves until the process ends."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.set_default_executor(self._threads)
        loop.add_signal_handler(signal.SIGTERM, ended.set)
        if self._table.programs:
            await self._gateway.start()
        loop.add_reader(self._server.event_fd, self._receive)
        self._receive()
        while self._failure is None and not ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), BEAT_S)
            if self._generator:
                self._flush_soon()
        for program in self._table.programs:
            await program.close()
        if self._failure is not None:
            raise self._failure

    def _receive(self) -> None:
        """Handles all messages that wait. The event of the socket only means that there may be some."""
        while self._server.handle_next() is not None:
            pass

    def _handle(self, message: Message) -> Reply | None:
        body: HostRequest = message.body
        self._generator = message.peer
        for start in body.started:
            self._players[start.episode] = player = self._player(start)
            self._tasks[start.episode] = task = asyncio.ensure_future(self._play(player))
            task.add_done_callback(self._note_failure)
        for said, tokens in zip(body.turns, unpack_lists(message, len(body.turns)), strict=True):
            if said.episode in self._players:
                self._players[said.episode].receive(said.branch, PolicyTurn(tokens.tolist(), said.status))
        for episode in body.dropped:
            if episode in self._tasks:
                self._tasks[episode].cancel()
        return None

    def _player(self, start: EpisodeStart) -> Player | ProgramPlayer:
        prompt, keeps, say = start.prompt, self._keeps_messages, self._say
        found = self._table.of(prompt.data_source)
        if isinstance(found, Named):
            threads, stuck = self._threads, self._stuck
            return Player(start, found, self._dialogue, self._limits, threads, say, keeps_messages=keeps, stuck=stuck)
        dialogue = self._dialogue.chat_for(prompt.columns)
        return ProgramPlayer(start, found, dialogue, self._limits, self._gateway, say, keeps_messages=keeps)

    async def _play(self, player: Player | ProgramPlayer) -> None:
        episode = player.start.episode
        try:
            ended = await player.play()
            self._ended.append(ended)  # another list than before the wait
            self._flush_soon()
        finally:
            del self._players[episode], self._tasks[episode]

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """Keeps an error that is not the user's, which `serve` raises."""
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()

    def _say(self, player: Player | ProgramPlayer, wish: NextTurn, tokens: Sequence[int]) -> None:
        self._says.append((wish, np.asarray(tokens, dtype=np.int32)))
        if len(self._says) >= MAX_SAYS:
            self._flush()
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Sends everything that collects before the event loop is idle in one message."""
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        says, ended, self._says, self._ended = self._says, self._ended, [], []
        body = HostReply([say for say, _ in says], ended, len(self._stuck))
        try:
            self._server.send(self._generator, 0, Reply(body, pack_lists([tokens for _, tokens in says])))
        except Exception as error:  # as a callback it would only be printed, and the turns would be lost
            self._failure = error
        self._receive()  # sending may use up the event of an incoming message
