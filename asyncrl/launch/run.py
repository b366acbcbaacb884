"""`asyncrl launch`: one run, from the checks to the summary.

launch()     check the config, place the roles, lock runs/<name>
  Run.run()
    _watch     every TICK_S, until all learner ranks have exited with code 0:
                 supervisor.tick     start groups that are due, restart those that died
                 _check_interrupts   Ctrl-C: tell the replay queue to stop the run after this step
                 _look               every STATUS_EVERY_S: status of the replay queue -> heartbeats, wanted
                                     generators, stall detector, bottleneck sentence, live view
    _finish    until all generators have left; kill those that hang
    finally    summary from the replay queue, trace.parquet completed, every process ended
  summary.json, report.html

waits for                      woken by                          deadline
a role to die or exit          polling every TICK_S              launch.progress_timeout_s without a step
a reply of the replay queue    the reply (ZeroMQ)                the client's timeout; then the queue is restarted
the learners to stop           the step in progress ends         launch.stop_timeout_s
the generators to leave        the queue's "done" in a reply     launch.stop_timeout_s; then they are killed
trace.parquet                  the replay process exits          TRACE_S; then it is killed
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

from asyncrl.config import Config
from asyncrl.data.hub import fetch
from asyncrl.errors import ConfigError, PeerTimeoutError, RunError
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
from asyncrl.launch.documents import REPORT, document_of
from asyncrl.launch.endpoints import run_endpoints
from asyncrl.launch.first_look import FirstLook
from asyncrl.launch.fork_server import ForkServer
from asyncrl.launch.launcher import Launcher
from asyncrl.launch.local import LocalLauncher, find_launcher
from asyncrl.launch.preflight import check_inputs, run_recipes
from asyncrl.launch.resources.fit import fit_memory
from asyncrl.launch.resources.placement import Placement, check_run_dir, check_transport, place_roles
from asyncrl.launch.role_group import Progress
from asyncrl.launch.run_dir import RunFolder, check_resume, discard_journal
from asyncrl.launch.shown_samples import ShownSamples
from asyncrl.launch.supervisor import Supervisor
from asyncrl.launch.worker import RoleSpec
from asyncrl.observe.live import LiveView
from asyncrl.observe.logs import configure_logs
from asyncrl.observe.report import write_report
from asyncrl.replay.client import LauncherClient
from asyncrl.rewards.reward_model import uses_reward_model

log = structlog.get_logger()

TICK_S = 0.1
STATUS_EVERY_S = 0.5
FAILURE_GRACE_S = 2.0
"""Time that the other roles have to stop after one role failed."""

TRACE_S = 120.0
"""Time that the replay process has to complete the trace: a minute is enough for a few million groups."""

STATUS_OF_EXIT = {
    EXIT_DONE: "finished",
    EXIT_FAILED: "failed",
    EXIT_CONFIG: "failed",
    EXIT_INTERRUPTED: "stopped",
}


def launch(config: Config, console: Console, *, without_journal: bool = False) -> int:
    """Runs training as configured, shows it on the console and returns the exit code.

    0: all steps are done. 1: the run failed; the cause is printed and in `summary.json`. 2: the run failed because of a
    setting that only the roles could check. 130: the run was interrupted.
    `without_journal` resumes from the newest checkpoint alone. Raises ConfigError before anything starts when the
    config cannot work, or cannot resume the existing run.
    """
    console = ignore_broken_pipe(console)
    config = fetch(config, console)
    check_resume(config)
    reward_model = uses_reward_model(config)
    launcher = find_launcher(config)()
    with closing(launcher):
        launcher.acquire(config)
        return _launch(config, console, launcher, reward_model=reward_model, without_journal=without_journal)


def _launch(config: Config, console: Console, launcher: Launcher, *, reward_model: bool, without_journal: bool) -> int:
    """`launch` on the hosts of the launcher."""
    hosts = launcher.hosts()
    placement = place_roles(config, reward_model=reward_model, hosts=hosts)
    check_run_dir(config, placement, hosts)
    run_recipes(config, console)
    with preloaded(placement, launcher):
        inputs = check_inputs(config, console)
        config = inputs.config.model_copy(update=length_of(config, inputs.rows, console))
        check_transport(config, placement)
        if not placement.gpus:
            check_cpu(config)
        placement = fit_memory(config, placement, reward_model=reward_model)
        if placement.gpus and config.model.dtype == "float32":
            console.print(
                "model.dtype = float32 on GPUs is slower and takes twice the memory; model.dtype=bfloat16 is usual",
                highlight=False,
            )
        interrupts = Interrupts(preemptible=launcher.preemptible)
        with (
            interrupts.caught(),
            run_endpoints(config, host=hosts[0].address, reward_model=reward_model) as endpoints,
            RunFolder(config) as folder,
        ):
            checkpoint = discard_journal(folder.path) if without_journal else ""
            folder.begin(config, endpoints, hosts)
            configure_logs(folder.path, "launcher", config.observe.log_level)
            if folder.moved_to is not None:
                console.print(f"the earlier run of this name is now {folder.moved_to}", highlight=False)
            spec = RoleSpec(
                "",
                0,
                str(folder.path),
                endpoints,
                (),
                inputs.prompt_tokens,
                group_relative=inputs.group_relative,
                greedy_baseline=inputs.greedy_baseline,
                checkpoint=checkpoint,
            )
            for name, text in launcher.describe().items():
                console.print(f"{name:10} {text}", highlight=False, soft_wrap=True)
            run = Run(config, placement, spec, console, interrupts, launcher)
            code = run.run()
            summary = folder.summary(run.summary) | run.bottleneck.summary(run.summary)
            show_end(console, summary)
            folder.write_summary(summary)
            report = folder.path / REPORT
            write_report(report, [document_of(folder.path)])
            console.print(f"folder     {folder.path}\nreport     {report}", highlight=False, soft_wrap=True)
    if interrupts.go_on_later and code in (EXIT_INTERRUPTED, EXIT_FAILED):
        launcher.requeue()
    return code


def length_of(config: Config, rows: int, console: Console) -> dict[str, Any]:
    """The update of a config with `epochs`: the steps that it stands for with this many training rows. Raises
    ConfigError if `observe.profile` has later steps."""
    if config.epochs is None:
        return {}
    steps = max(1, round(config.epochs * rows / config.replay.groups_per_step))
    try:
        config.observe.check_profile(steps)
    except ValueError as error:
        raise ConfigError(f"{error} (epochs = {config.epochs:g} of {rows:,} rows)") from None
    console.print(f"{config.epochs:g} epochs of {rows:,} rows: {steps:,} steps", highlight=False)
    return {"steps": steps, "epochs": None}


@contextmanager
def preloaded(placement: Placement, launcher: Launcher) -> Iterator[None]:
    """Gives a launcher of this machine the process that roles are forked from, unless one of them has a GPU."""
    if not isinstance(launcher, LocalLauncher) or placement.gpus:
        yield
        return
    fork_server = launcher.fork_server = ForkServer()
    try:
        yield
    finally:
        fork_server.close()


class Run:
    """A run in progress: its roles, the launcher's client of the replay queue, and how the run ended."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        spec: RoleSpec,
        console: Console,
        interrupts: Interrupts,
        launcher: Launcher,
    ) -> None:
        self.config = config
        self.console = console
        self.interrupts = interrupts
        self.processes = launcher
        self.client = LauncherClient(spec.endpoints)
        self.supervisor = Supervisor(config, placement, spec, self.processes, self.client, say=self._say)
        self.summary: dict[str, Any] = {}
        self.started_s = time.monotonic()
        self.progress = Progress(config, self.started_s)
        self.bottleneck = BottleneckMonitor(config, placement)
        self.first_look = FirstLook(Path(spec.run_dir), config, self._say)
        self.shown_samples = ShownSamples(Path(spec.run_dir), config)
        self._stop_since_s: float | None = None
        self._stop_told = False

    def run(self) -> int:
        """Starts all roles, watches them until the end, stops them and returns the exit code."""
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
                self._say(f"{role.name} ({role.place}) does not die of SIGKILL and is left running")
            self.client.close()
        if lacking and code == EXIT_DONE:
            code = EXIT_FAILED
            self.summary |= {"status": STATUS_OF_EXIT[code], "error": lacking}
        return code

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _watch(self) -> None:
        """Returns when all learners have exited with code 0. Raises RunError otherwise."""
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
        """Reads the status of the replay queue, shows it, and restarts the learners when they stall."""
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
        self.first_look.update(status["rewards"], time.monotonic())
        if sentence := self.bottleneck.update(status):
            view.judge(sentence)
        if status["step"] > 0:
            view.show_samples(self.shown_samples.update())
            view.update(status, restarts=sum(self.supervisor.restarts.values()))

    def _status(self) -> dict[str, Any] | None:
        """The replay queue's status, also passed to the supervisor; None while the queue does not answer."""
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
            self._say("stopping after this step (interrupt again to stop immediately) ...")
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
            raise RunError("interrupted twice: stopped immediately, the last step is not saved")
        if waited_s > self.interrupts.limit_s(self.config.launch.stop_timeout_s):
            names = ", ".join(role.name for role in self.supervisor.alive)
            raise RunError(f"still running {waited_s:.0f} s after the request to stop: {names}")

    def _finish(self) -> None:
        """Waits until the generators have ended and the replay queue answers. A generator that hangs is killed: its
        results are not needed any more."""
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
                self._say(f"still running {limit_s:g} s after the last step, and killed: {', '.join(left)}")
                supervisor.end_hanging()
            time.sleep(TICK_S)

    def _shut_replay(self) -> str:
        """Waits for the replay process to complete its trace. Returns why it could not, or ""."""
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
        cause = f"it did not exit within {TRACE_S:g} s" if hangs else replay.cause()
        return (
            f"training is done and the model is saved, but the replay queue did not complete trace.parquet: {cause}; "
            "`asyncrl launch --resume` completes it"
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
