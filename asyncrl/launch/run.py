"""`asyncrl launch`: one run from checks to summary."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import structlog
from rich.console import Console

from asyncrl.config import Config
from asyncrl.errors import ConfigError, DataError, PeerTimeoutError, RunError
from asyncrl.generator.vllm_backend.setup import check_cpu
from asyncrl.launch.bottleneck import BottleneckMonitor
from asyncrl.launch.console import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Interrupts,
    ignore_broken_pipe,
    show_end,
)
from asyncrl.launch.endpoints import run_endpoints
from asyncrl.launch.fit import fit_memory
from asyncrl.launch.fork_server import ForkServer
from asyncrl.launch.local import LAUNCHERS
from asyncrl.launch.placement import Placement, place_roles
from asyncrl.launch.preflight import check_inputs, run_recipes
from asyncrl.launch.role_group import Progress
from asyncrl.launch.run_dir import RunFolder, check_resume, discard_journal
from asyncrl.launch.supervisor import Supervisor
from asyncrl.launch.worker import ROLES, RoleSpec
from asyncrl.observe.live import LiveView
from asyncrl.observe.logs import configure_logs
from asyncrl.observe.report import write_report
from asyncrl.plan.measured import MAX_GROUPS
from asyncrl.plan.tail import TraceTail
from asyncrl.replay.client import LauncherClient
from asyncrl.rewards.reward_model import uses_reward_model

log = structlog.get_logger()

TICK_S = 0.1
STATUS_EVERY_S = 0.5
FAILURE_GRACE_S = 2.0
"""How long the others may take to stop after one role failed."""

TRACE_S = 120.0
"""How long the replay process may take to complete the trace: a minute for some millions of groups."""

STATUS_OF_EXIT = {
    EXIT_DONE: "finished",
    EXIT_FAILED: "failed",
    EXIT_CONFIG: "failed",
    EXIT_INTERRUPTED: "stopped",
}


def launch(config: Config, console: Console, *, without_journal: bool = False) -> int:
    """Runs training as the config says and shows it on the console; gives the exit code.

    0: all steps are done. 1: the run failed; the cause is printed and in `summary.json`. 2: it failed, and the cause is
    a setting that only the roles could find wrong. 130: it was interrupted.
    `without_journal` resumes from the newest checkpoint alone. Raises ConfigError before anything starts when the
    config cannot work, or cannot go on with the run that there is.
    """
    console = ignore_broken_pipe(console)
    check_resume(config)
    reward_model = uses_reward_model(config)
    plan = place_roles(config, reward_model=reward_model)
    run_recipes(config, console)
    with preloaded(plan) as fork_server:
        prompt_tokens = check_inputs(config, console)
        if not plan.gpus:
            check_cpu(config)
        plan = fit_memory(config, plan, reward_model=reward_model)
        if plan.gpus and config.model.dtype == "float32":
            console.print(
                "model.dtype = float32 on GPUs: slower, and twice the memory; model.dtype=bfloat16 is usual there",
                highlight=False,
            )
        interrupts = Interrupts()
        with (
            interrupts.caught(),
            run_endpoints(config, reward_model=reward_model) as endpoints,
            RunFolder(config) as folder,
        ):
            checkpoint = discard_journal(folder.path) if without_journal else ""
            folder.begin(config, endpoints)
            configure_logs(folder.path, "launcher", config.observe.log_level)
            if folder.moved_to is not None:
                console.print(f"the earlier run of this name is now {folder.moved_to}", highlight=False)
            spec = RoleSpec("", 0, str(folder.path), endpoints, (), prompt_tokens, checkpoint=checkpoint)
            run = Run(config, plan, spec, console, interrupts)
            run.processes.fork_server = fork_server
            code = run.run()
            summary = folder.summary(run.summary) | run.judge.summary(run.summary)
            show_end(console, summary)
            folder.write_summary(summary)
            report = write_report(folder.path, summary, trace_of(folder.path))
            console.print(f"folder     {folder.path}\nreport     {report}", highlight=False, soft_wrap=True)
    return code


@contextmanager
def preloaded(plan: Placement) -> Iterator[ForkServer | None]:
    """A process to fork the roles of this plan from; None where one of them has a GPU."""
    if any(share.gpus for role in ROLES for share in plan.of(role)):
        yield None
        return
    fork_server = ForkServer()
    try:
        yield fork_server
    finally:
        fork_server.close()


def trace_of(run_dir: Path) -> pa.Table | None:
    """The newest part of the run's trace; None when there is none that can be read."""
    try:
        return TraceTail(run_dir, rows=MAX_GROUPS).read()
    except DataError as error:
        log.warning("no timeline in the report", error=str(error))
        return None


class Run:
    """A run in progress: its roles, its replay queue as the launcher sees it, and how it ended."""

    def __init__(
        self, config: Config, plan: Placement, spec: RoleSpec, console: Console, interrupts: Interrupts
    ) -> None:
        self.config = config
        self.console = console
        self.interrupts = interrupts
        self.processes = LAUNCHERS[config.launch.cluster]()
        self.client = LauncherClient(spec.endpoints)
        self.supervisor = Supervisor(config, plan, spec, self.processes, self.client, say=self._say)
        self.summary: dict[str, Any] = {}
        self.started_s = time.monotonic()
        self.progress = Progress(config, self.started_s)
        self.judge = BottleneckMonitor(config, plan)
        self._stop_since_s: float | None = None
        self._stop_told = False

    def run(self) -> int:
        """Starts everything, watches until the end, stops everything; gives the exit code."""
        error = ""
        code = EXIT_DONE
        try:
            self._watch()
            self._finish()
            if self._stop_since_s is not None:
                code = EXIT_INTERRUPTED
        except (ConfigError, RunError, PeerTimeoutError) as failure:
            error, code = str(failure), EXIT_CONFIG if isinstance(failure, ConfigError) else EXIT_FAILED
            log.error("run failed", error=error)
        finally:
            self.summary = self._summarize(code, error)
            lacking = self._shut_replay()
            for role in self.processes.end(grace_s=FAILURE_GRACE_S):
                self._say(f"{role.name} (process {role.process.pid}) does not die of SIGKILL and is left behind")
            self.client.close()
        if lacking and code == EXIT_DONE:
            code = EXIT_FAILED
            self.summary |= {"status": STATUS_OF_EXIT[code], "error": lacking}
        return code

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _watch(self) -> None:
        """Returns when all learners have ended well. Raises RunError otherwise."""
        config = self.config
        view = LiveView(self.console, run=config.run, steps=config.steps, max_staleness=config.replay.staleness_limit)
        next_status_s = 0.0
        with view:
            view.phase("starting ...")
            while not self.supervisor.learners_ended:
                self.supervisor.tick(time.monotonic())
                self._check_interrupts()
                if time.monotonic() >= next_status_s:
                    self._look(view)
                    next_status_s = time.monotonic() + STATUS_EVERY_S
                time.sleep(TICK_S)
            self._look(view)

    def _look(self, view: LiveView) -> None:
        """Asks the replay queue how things are, shows it, and starts anew what hangs."""
        status = self._status()
        if status is None:
            return
        learners = self.supervisor.learners
        if learners.restart_at_s is None and not self.supervisor.learners_ended:
            reason = self.progress.check(
                status,
                learners_started_s=learners.started_s,
                missing=self.supervisor.missing,
                now_s=time.monotonic(),
            )
            if reason:
                self.supervisor.restart(learners, reason, time.monotonic(), hangs=True)
        if sentence := self.judge.update(status):
            view.judge(sentence)
        if status["step"] > 0:
            view.update(status, restarts=sum(self.supervisor.restarts.values()))

    def _status(self) -> dict[str, Any] | None:
        """The replay queue's status, of which the supervisor has heard; None while there is none."""
        if not self.supervisor.replay.running:
            return None
        try:
            status = self.client.status()
            self.supervisor.update(status, time.monotonic())
        except PeerTimeoutError as error:
            log.warning("no status", error=str(error))
            self.supervisor.miss(time.monotonic())
            return None
        return status

    def _check_interrupts(self) -> None:
        if self.interrupts.count and self._stop_since_s is None:
            self._stop_since_s = time.monotonic()
            self._say("stopping after this step (once more to stop at once) ...")
        if self._stop_since_s is None:
            return
        if not self._stop_told and self.supervisor.replay.running:
            try:
                self.client.stop("interrupted")
                self._stop_told = True
            except PeerTimeoutError as error:
                log.warning("the replay queue does not know yet that the run stops", error=str(error))
        waited_s = time.monotonic() - self._stop_since_s
        if self.interrupts.count > 1:
            raise RunError("interrupted twice: stopped at once, the last step is not saved")
        if waited_s > self.config.launch.stop_timeout_s:
            names = ", ".join(role.name for role in self.supervisor.alive)
            raise RunError(f"still running {waited_s:.0f} s after the request to stop: {names}")

    def _finish(self) -> None:
        """Lets the generators end by themselves, and the replay queue come back if it is away; a generator that hangs
        is ended: nothing that it could still give is wanted."""
        supervisor = self.supervisor
        supervisor.end_generation()
        limit_s, since_s = self.config.launch.stop_timeout_s, time.monotonic()
        while True:
            supervisor.tick(time.monotonic())
            if self._status() is None:
                since_s = time.monotonic()  # without the queue no generator knows that it is done
            left = [role.name for role in supervisor.alive if role.spec.role == "generator"]
            if not left and supervisor.answering_s is not None:
                return
            if time.monotonic() - since_s > limit_s:
                self._say(f"still running {limit_s:g} s after the last step, and ended: {', '.join(left)}")
                supervisor.end_hanging()
            time.sleep(TICK_S)

    def _shut_replay(self) -> str:
        """Lets the replay process complete its trace; what hangs is ended afterwards. Gives why it could not."""
        if not self.supervisor.replay.running:
            return ""
        try:
            self.client.shutdown()
        except PeerTimeoutError as error:
            log.warning("replay does not answer", error=str(error))
        (replay,) = self.supervisor.replay.processes
        hangs = self.processes.wait([replay], TRACE_S)
        if not hangs and replay.code == 0:
            return ""
        cause = f"it did not end within {TRACE_S:g} s" if hangs else replay.cause()
        return (
            f"training is done and the model saved, but the replay queue did not complete trace.parquet: {cause}; "
            "`asyncrl launch --resume` does"
        )

    def _summarize(self, code: int, error: str) -> dict[str, Any]:
        own: dict[str, Any] = {"status": STATUS_OF_EXIT[code], "wall_s": time.monotonic() - self.started_s}
        if error:
            own["error"] = error
        own["restarts"] = self.supervisor.restarts
        if not self.supervisor.replay.running:
            return own
        try:
            told = self.client.summary()
        except (PeerTimeoutError, RunError) as failure:
            log.warning("no summary from the replay queue", error=str(failure))
            return own
        return own | told | {"restarts": own["restarts"]}
