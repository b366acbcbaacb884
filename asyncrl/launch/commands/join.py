"""`asyncrl join`: this machine's generators for a run on another one.

    hello      versions and digests of the model     until the run answers, or `patience_s` is over
    generators as roles of this machine              until the run is over, gone, or resumed under another run id
    leave      leases are handed back                LEAVE_S

It is the launcher of its generators: it restarts those that die, and tells the replay queue. The run only sees
generators that it need not start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

import structlog
from rich.console import Console

from asyncrl.config import Config, read_config
from asyncrl.config.placement import PlacementConfig
from asyncrl.errors import ConfigError, PeerTimeoutError, RunError
from asyncrl.launch.console import EXIT_DONE, EXIT_INTERRUPTED, Interrupts
from asyncrl.launch.invitations import GuestKey, read_key
from asyncrl.launch.local import LocalLauncher
from asyncrl.launch.log_tail import LogTail
from asyncrl.launch.packages import package_versions
from asyncrl.launch.placer import LOCAL_RUNS
from asyncrl.launch.reception import model_facts
from asyncrl.launch.resources.placement import RoleResources, find_room
from asyncrl.launch.role_group import RestartHistory, RoleGroup
from asyncrl.launch.worker import EXIT_SILENT_PEER, RoleSpec
from asyncrl.observe.logs import configure_logs
from asyncrl.wire.bounds import Body
from asyncrl.wire.endpoints import NAMED, Endpoints
from asyncrl.wire.guest_messages import GuestLog, Hello, Welcome
from asyncrl.wire.guests import HELLO_ID
from asyncrl.wire.launcher_messages import Lost
from asyncrl.wire.rpc import Connection

log = structlog.get_logger()

TICK_S = 0.1
ANSWER_S = 2.0
"""Deadline of the answer to a hello; the next one follows."""
HELLO_EVERY_S = 2.0
RESEND_S = 0.5
LEAVE_S = 15.0
"""Time in which generators hand their leases back."""
Outcome = Literal["left", "over", "gone", "resumed"]


def join(
    address: str, key_file: Path, console: Console, *, generators: int | None, model: str | None, patience_s: float
) -> int:
    """Runs generators for the run at the ZeroMQ address (empty: that of the key) until it is over. Returns the exit
    code: 0, or 130 when interrupted.

    Raises ConfigError and RunError when this machine cannot join, and PeerTimeoutError when the run does not answer for
    `patience_s`."""
    key = read_key(key_file)
    head = Head(key, address or key.address)
    configure_logs(Path(LOCAL_RUNS).expanduser() / key.run, f"guest-{key.name}", "info")
    interrupts = Interrupts()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    with interrupts.caught():
        while True:
            welcome = head.await_welcome(patience_s, say, lambda: bool(interrupts.count))
            if welcome is None:
                return EXIT_INTERRUPTED
            stay = Stay(head, welcome, say, generators=generators, model=model)
            try:
                outcome = stay.run(lambda: bool(interrupts.count))
            finally:
                stay.end()
            say(OUTCOMES[outcome].format(run=welcome.run))
            if outcome == "left":
                return EXIT_INTERRUPTED
            if outcome == "over" and stay.ended:
                return EXIT_DONE


OUTCOMES: dict[Outcome, str] = {
    "left": "left {run}; its leases are handed back",
    "over": "{run} needs no more groups",
    "gone": "{run} does not answer; waiting for it",
    "resumed": "{run} was started again",
}


class Head:
    """The replay queue as a guest sees it."""

    def __init__(self, key: GuestKey, address: str) -> None:
        self._key = key
        self.address = address

    def endpoints(self, run_id: str) -> Endpoints:
        """The endpoints of a guest in the launch with this run id: it connects to the replay queue alone."""
        return Endpoints(run_id, self.address, f"{NAMED}weights", f"{NAMED}learners", keys=self._key.keys)

    def hello(self, facts: dict[str, str]) -> Welcome | None:
        """Returns the answer to a hello; None if there is none. Raises ConfigError if the guest cannot join."""
        with closing(Connection(self.endpoints(HELLO_ID), resend_s=RESEND_S, linger_s=0.0)) as queue:
            try:
                welcome: Welcome = queue.request(Hello(facts), timeout_s=ANSWER_S).body
            except PeerTimeoutError:
                return None
        if welcome.problem:
            raise ConfigError(f"cannot join the run at {self.address}: {welcome.problem}")
        return welcome

    def await_welcome(
        self, patience_s: float, say: Callable[[str], None], should_stop: Callable[[], bool]
    ) -> Welcome | None:
        """Returns the answer to the first hello; None if interrupted. Raises as `hello`, and PeerTimeoutError."""
        deadline_s, told = time.monotonic() + patience_s, False
        while not should_stop():
            if (welcome := self.hello(package_versions())) is not None:
                return welcome
            problem = f"{self.address} does not answer: the run is not up, or it does not admit this key"
            if time.monotonic() > deadline_s:
                raise PeerTimeoutError(f"{problem} (revoked, or of another run); waited {patience_s:g} s (--patience)")
            if not told:
                say(f"{problem}; waiting up to {patience_s:g} s for it")
                told = True
        return None

    def lost(self, run_id: str, generator: int) -> None:
        """Says that a generator of this guest has ended."""
        self._tell(run_id, Lost(generator), "the run does not know yet that a generator has ended")

    def send_log(self, run_id: str, generator: int, tail: LogTail) -> bool:
        """Passes on what a generator of this guest has logged. False if the run does not answer; then it is sent again
        later."""
        lines, end = tail.read()
        if not lines:
            return True
        told = self._tell(run_id, GuestLog(generator, lines), "the run does not have the log of a generator yet")
        if told:
            tail.passed(end)
        return told

    def _tell(self, run_id: str, body: Body, problem: str) -> bool:
        """Sends a message to the launch with this run id. False if it does not answer; then the `problem` is logged."""
        with closing(Connection(self.endpoints(run_id), resend_s=RESEND_S, linger_s=0.0)) as queue:
            try:
                queue.request(body, timeout_s=ANSWER_S)
            except PeerTimeoutError as error:
                log.warning(problem, error=str(error))
                return False
        return True


class Stay:
    """The generators of this machine during one launch of the run."""

    def __init__(
        self, head: Head, welcome: Welcome, say: Callable[[str], None], *, generators: int | None, model: str | None
    ) -> None:
        """Raises ConfigError if this machine cannot run them: what differs by name."""
        self.ended = welcome.ended
        """True if all steps of the run are trained."""
        self._head, self._welcome, self._say = head, welcome, say
        config = _config_here(welcome, model)
        self._facts = package_versions() | model_facts(config.model.path)
        head.hello(self._facts)  # raises ConfigError if the model is another one
        count = min(generators or welcome.generators, welcome.generators)
        if generators is not None and generators > count:
            say(f"--generators {generators}: the invitation is for {count}")
        self._launcher = LocalLauncher()
        spec = RoleSpec(
            "generator",
            0,
            str(Path(LOCAL_RUNS).expanduser() / welcome.run),
            head.endpoints(welcome.run_id),
            (),
            welcome.prompt_tokens,
            greedy_baseline=welcome.greedy_baseline,
            config=config.to_yaml(),
        )
        self._groups = [
            RoleGroup(
                f"generator-{welcome.first + place}",
                [(replace(spec, index=welcome.first + place, cpus=resources.cpus), resources)],
                RestartHistory(max_restarts=config.launch.max_restarts),
            )
            for place, resources in enumerate(_rooms(config, self._launcher, count))
        ]
        self._tails = {group.index: LogTail(spec.logs / f"{group.name}.jsonl") for group in self._groups}
        names = ", ".join(group.name for group in self._groups)
        say(f"joins {welcome.run} at {head.address} with {names}; logs in {spec.logs}")

    def run(self, should_stop: Callable[[], bool]) -> Outcome:
        """Runs the generators until the run is over, gone or resumed, or `should_stop()`. Raises RunError when one
        cannot run."""
        next_hello_s = time.monotonic() + HELLO_EVERY_S
        while not should_stop():
            now_s = time.monotonic()
            if outcome := self._tick(now_s):
                if outcome == "over" and (welcome := self._head.hello(self._facts)) is not None:
                    self.ended = welcome.ended
                return outcome
            if now_s >= next_hello_s:
                next_hello_s = now_s + HELLO_EVERY_S
                welcome = self._head.hello(self._facts)
                if welcome is not None and welcome.run_id != self._welcome.run_id:
                    return "resumed"
                self.ended = self.ended or (welcome is not None and welcome.ended)
                if welcome is not None:
                    self._send_logs()
            time.sleep(TICK_S)
        return "left"

    def end(self) -> None:
        """Ends the generators, which hand their leases back."""
        for role in self._launcher.end(grace_s=LEAVE_S):
            self._say(f"{role.name} ({role.place}) does not die of SIGKILL and is left running")
        self._send_logs()
        for group in self._groups:
            if group.starts:
                self._head.lost(self._welcome.run_id, group.index)

    def _send_logs(self) -> None:
        """Passes the logs on, as far as the run answers."""
        for generator, tail in self._tails.items():
            if not self._head.send_log(self._welcome.run_id, generator, tail):
                return

    def _tick(self, now_s: float) -> Outcome | None:
        over = True
        for group in self._groups:
            role = group.ended()
            over = over and role is not None and role.code == 0
            if group.restart_at_s is not None:
                if now_s >= group.restart_at_s:
                    group.start(self._launcher, now_s)
            elif role is not None and role.code == EXIT_SILENT_PEER:
                return "gone"
            elif role is not None and role.code != 0:
                self._restart(group, now_s)
        return "over" if over else None

    def _restart(self, group: RoleGroup, now_s: float) -> None:
        role = group.ended()
        assert role is not None
        cause = role.cause()
        group.made_progress = True  # the run knows whether it worked; here only its age counts
        delay_s = None if group.failed() is not None else group.delay_s(now_s)
        group.kill(self._launcher)
        self._send_logs()
        self._head.lost(self._welcome.run_id, group.index)
        if delay_s is None:
            raise RunError(cause)
        group.restart_at_s = now_s + delay_s
        self._say(f"{cause}; restart {group.history.total} in {delay_s:g} s")


def _config_here(welcome: Welcome, model: str | None) -> Config:
    """The run's config on this machine. Raises ConfigError if the model or the weights cannot be read here."""
    config = read_config(welcome.config)
    path = Path(model or config.model.path).expanduser()
    if not path.is_dir():
        raise ConfigError(f"model {path}: there is no such folder on this machine; give the run's model by --model")
    url = config.weights.url or ""
    if "://" not in url and not Path(url).is_dir():
        raise ConfigError(
            f"weights.url = {url!r}: there is no such folder on this machine, which gets the weights from there; mount "
            "it at this path, or start the run with a URL such as s3://bucket/weights"
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(path.absolute())})})


def _rooms(config: Config, launcher: LocalLauncher, count: int) -> list[RoleResources]:
    """Resources for the generators. Raises ConfigError if this machine has too few GPUs."""
    config = config.model_copy(update={"placement": PlacementConfig()})
    rooms: list[RoleResources] = []
    while len(rooms) < count:
        room = find_room(config, "generator", launcher.hosts(), rooms)
        if room is None:
            raise ConfigError(f"--generators {count}: this machine has {len(rooms)} free GPUs; ask for fewer")
        rooms.append(room)
    return rooms
