"""`asyncrl launch`: one run, from the checks to the summary.

launch()     finds the hosts, checks the config, places the roles, locks runs/<name>
LiveRun.run()
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
trace.parquet                  the replay process exits          TRACE_S and more by its size; then it is killed
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.data.hub import fetch
from asyncrl.errors import ConfigError, PeerTimeoutError, RunError, observing
from asyncrl.generator.vllm_backend.setup import check_cpu
from asyncrl.launch.bottleneck import BottleneckMonitor
from asyncrl.launch.checks import check_inputs, check_machine, length_of, run_recipes, with_start_deadline
from asyncrl.launch.fork_server import ForkServer
from asyncrl.launch.launcher import Launcher, LocalLauncher, find_launcher
from asyncrl.launch.memory import choose_staging, fit_memory
from asyncrl.launch.placement import Placement, check_transport, place_roles
from asyncrl.launch.rollback import collapse_error, config_to_resume, is_due, resume_point
from asyncrl.launch.row_checks import PromptScan
from asyncrl.launch.run_dir import RunFolder, check_resume, nothing_to_resume, run_endpoints
from asyncrl.launch.supervisor import Progress, Supervisor
from asyncrl.launch.worker import RoleSpec
from asyncrl.observe.console import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Interrupts,
    ignore_broken_pipe,
    say,
)
from asyncrl.observe.live import LiveView
from asyncrl.observe.logs import configure_logs
from asyncrl.observe.run_report import report_end
from asyncrl.observe.sample_watch import SampleWatch
from asyncrl.observe.trace import trace_bytes
from asyncrl.replay.client import LauncherClient
from asyncrl.rewards.reward_model import uses_reward_model

log = structlog.get_logger()

TICK_S = 0.1
STATUS_EVERY_S = 0.5
FAILURE_GRACE_S = 2.0
"""Time that the other roles have to stop after one role failed."""
TRACE_S = 120.0
"""Time that the replay process has to complete the trace, in addition to the time for its bytes."""
TRACE_BYTES_PER_S = 250_000
"""Rate at which its parts are joined, at least: a tenth of that of one core."""

STATUS_OF_EXIT = {EXIT_DONE: "finished", EXIT_FAILED: "failed", EXIT_CONFIG: "failed", EXIT_INTERRUPTED: "stopped"}


def launch(config: Config, console: Console, *, without_journal: bool = False) -> int:
    """Runs training as configured, shows it on the console and returns the exit code.

    0: all steps are done. 1: the run failed; the cause is printed and in `summary.json`. 2: the run failed because of a
    setting that only the roles could check. 130: the run was interrupted.
    A run that collapses continues here if `learner.on_collapse` is "rollback". `without_journal` resumes from the
    newest checkpoint alone. Raises ConfigError before anything starts when the config cannot work, or cannot resume the
    existing run.
    """
    console = ignore_broken_pipe(console)
    config = fetch(config, console)
    if nothing_to_resume(config, console):
        return EXIT_DONE
    check_resume(config)
    reward_model = uses_reward_model(config)
    launcher = find_launcher(config)()
    with closing(launcher):
        launcher.acquire(config)
        while True:
            code, goes_on = _launch(config, console, launcher, reward_model, without_journal)
            if not goes_on:
                return code
            config, without_journal = config_to_resume(config), False


def _launch(
    config: Config, console: Console, launcher: Launcher, reward_model: bool, without_journal: bool
) -> tuple[int, bool]:
    """Returns the exit code, and whether a rollback follows."""
    hosts = launcher.hosts()
    placement = place_roles(config, reward_model=reward_model, hosts=hosts)
    check_machine(config)
    config = with_start_deadline(config, placement)
    run_recipes(config, console)
    with preloaded(config, placement, launcher):
        inputs = check_inputs(config, console)
        config = inputs.config.model_copy(update=length_of(config, inputs.rows, console))
        check_transport(config, placement)
        if config.generator.engine == "vllm" and not placement.gpus:
            check_cpu(config)
        config, staging = choose_staging(config, placement, reward_model=reward_model)
        placement = fit_memory(config, placement, reward_model=reward_model)
        if staging:
            say(console, staging)
        if placement.gpus and config.model.dtype == "float32":
            text = "model.dtype = float32 on GPUs is slower and takes twice the memory; model.dtype=bfloat16 is usual"
            say(console, text)
        interrupts = Interrupts(preemptible=launcher.preemptible)
        with (
            interrupts.caught(),
            run_endpoints(config, host=hosts[0].address, reward_model=reward_model) as endpoints,
            RunFolder(config) as folder,
            PromptScan(config, limit_tokens=inputs.prompt_tokens, has_trained=bool(folder.earlier_s)) as scan,
        ):
            config, checkpoint = resume_point(folder.path, config, console, without_journal=without_journal)
            folder.begin(config, endpoints, hosts)
            configure_logs(folder.path, "launcher")
            if folder.moved_to is not None:
                say(console, f"the earlier run of this name is now {folder.moved_to}")
            relative, greedy = inputs.group_relative, inputs.greedy_baseline
            spec = RoleSpec("", 0, str(folder.path), endpoints, (), inputs.prompt_tokens, relative, greedy)
            spec = replace(spec, checkpoint=checkpoint)
            inputs.first_row.show(console)
            for name, text in launcher.describe().items():
                say(console, f"{name:10} {text}")
            run = LiveRun(config, placement, spec, console, interrupts, launcher, scan)
            code = run.run()
            goes_on = code == EXIT_FAILED and not interrupts.count and is_due(config, folder.summary(run.summary))
            start = {"start": asdict(inputs.first_row), "rows": scan.summary}
            report_end(run.summary, start, run.bottleneck, folder, Console(quiet=True) if goes_on else console)
    if interrupts.go_on_later and code in (EXIT_INTERRUPTED, EXIT_FAILED):
        launcher.requeue()
    # Without a summary, on a full disk, the run would stop in the same step again.
    return code, goes_on and (folder.path / "summary.json").is_file()


@contextmanager
def preloaded(config: Config, placement: Placement, launcher: Launcher) -> Iterator[None]:
    """Gives a launcher of this machine the process that roles are forked from, unless one of them has a GPU."""
    if not isinstance(launcher, LocalLauncher) or placement.gpus:
        yield
        return
    fork_server = launcher.fork_server = ForkServer(engine=config.generator.engine)
    try:
        yield
    finally:
        fork_server.close()


class LiveRun:
    """A run in progress: its roles, the launcher's client of the replay queue, and how the run ended."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        spec: RoleSpec,
        console: Console,
        interrupts: Interrupts,
        launcher: Launcher,
        scan: PromptScan,
    ) -> None:
        self.config = config
        self.console = console
        self.interrupts = interrupts
        self.processes = launcher
        self._say = partial(say, console)
        self.client = LauncherClient(spec.endpoints)
        self.supervisor = Supervisor(config, placement, spec, self.processes, self.client, say=self._say)
        self.summary: dict[str, Any] = {}
        self.started_s = time.monotonic()
        self.progress = Progress(config, self.started_s)
        self.bottleneck = BottleneckMonitor(config, placement)
        self.samples = SampleWatch(Path(spec.run_dir), config, self._say)
        self.scan = scan
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
                self._say(f"{role.name} ({role.place}) could not be killed (SIGKILL) and was left running")
            self.client.close()
        if code == EXIT_DONE and (error := collapse_error(self.config, self.summary) or lacking):
            code = EXIT_FAILED
            self.summary |= {"status": STATUS_OF_EXIT[code], "error": error}
        return code

    def _watch(self) -> None:
        """Returns when all learners have exited with code 0. Raises RunError otherwise."""
        config = self.config
        view = LiveView(self.console, run=config.run, steps=config.steps, max_staleness=config.replay.max_staleness)
        next_status_s = 0.0
        with view:
            view.phase("starting ...")
            while not self.supervisor.learners_ended:
                self.supervisor.tick(time.monotonic())
                self._check_interrupts()
                self.scan.report(self._say)
                if time.monotonic() >= next_status_s:
                    self._look(view)
                    next_status_s = time.monotonic() + STATUS_EVERY_S
                time.sleep(TICK_S)
            self._look(view)

    def _look(self, view: LiveView) -> None:
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
        self.scan.has_trained |= status["step"] > 0
        with observing("live view"):
            if sentence := self.bottleneck.update(status):
                view.judge(sentence)
            view.show_samples(self.samples.poll(status))
            if status["step"] > 0:
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
        if not self.supervisor.replay.running:
            return ""
        try:
            self.client.shutdown()
        except PeerTimeoutError as error:
            log.warning("replay does not answer", error=str(error))
        (replay,) = self.supervisor.replay.processes
        limit_s = TRACE_S + trace_bytes(self.config.run_dir) / TRACE_BYTES_PER_S
        hangs = self.processes.wait([replay], limit_s)
        if not hangs and replay.code == 0:
            return ""
        cause = f"it did not exit within {limit_s:.0f} s" if hangs else replay.cause()
        return (
            f"training is done and the model is saved, but the replay queue did not complete trace.parquet: {cause}; "
            "`asyncrl launch --resume` completes it"
        )

    def _summarize(self, code: int, error: str) -> dict[str, Any]:
        summary: dict[str, Any] = {"status": STATUS_OF_EXIT[code], "wall_s": time.monotonic() - self.started_s}
        if error:
            summary["error"] = error
        if not self.supervisor.replay.running:
            return summary | {"restarts": self.supervisor.restarts}
        try:
            summary |= self.client.summary()
        except (PeerTimeoutError, RunError) as failure:
            log.warning("no summary from the replay queue", error=str(failure))
        return summary | {"restarts": self.supervisor.restarts}
