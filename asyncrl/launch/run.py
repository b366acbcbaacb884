"""`asyncrl launch`: one run from checks to summary."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from rich.console import Console

from asyncrl.config import Config
from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.launch.checks import check_inputs, make_missing
from asyncrl.launch.folder import RunFolder
from asyncrl.launch.local import LAUNCHERS, RoleProcess
from asyncrl.launch.resources import Plan, Share, make_endpoints, plan_resources
from asyncrl.launch.role import ROLES, RoleSpec
from asyncrl.observe.live import LiveView
from asyncrl.observe.logs import configure_logs
from asyncrl.observe.report import write_report
from asyncrl.observe.verdict import bottleneck
from asyncrl.replay.client import LauncherClient
from asyncrl.rewards.reward_model import uses_reward_model
from asyncrl.types import Endpoints

log = structlog.get_logger()

TICK_S = 0.1
STATUS_EVERY_S = 0.5
FAILURE_GRACE_S = 2.0
"""How long the others may take to stop after one role failed."""

EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
STATUS_OF_EXIT = {EXIT_DONE: "finished", EXIT_FAILED: "failed", EXIT_INTERRUPTED: "stopped"}


class Interrupts:
    """Counts Ctrl-C and SIGTERM instead of raising in the middle of something."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def caught(self) -> Iterator[None]:
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        self.count += 1


def launch(config: Config, console: Console) -> int:
    """Runs training as the config says and shows it on the console; gives the exit code.

    0: all steps are done. 1: the run failed; the cause is printed and in `summary.json`. 130: it was interrupted.
    Raises ConfigError before anything starts when the config cannot work.
    """
    reward_model = uses_reward_model(config)
    plan = plan_resources(config, reward_model=reward_model)
    make_missing(config, console)
    prompt_tokens = check_inputs(config)
    endpoints = make_endpoints(config, f"{config.run}-{uuid.uuid4().hex[:8]}", reward_model=reward_model)
    interrupts = Interrupts()
    with interrupts.caught(), RunFolder(config) as folder:
        folder.write_config(config)
        configure_logs(folder.path, "launcher", config.observe.log_level)
        if folder.moved_to is not None:
            console.print(f"the earlier run of this name is now {folder.moved_to}", highlight=False)
        run = Run(config, plan, endpoints, prompt_tokens, console, interrupts)
        code = run.conduct()
        folder.write_summary(run.summary)
        report = write_report(folder.path, run.summary)
        show_end(console, run.summary, str(folder.path), str(report))
    return code


class Run:
    """A run in progress: its role processes, its replay queue as the launcher sees it, and how it ended."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        endpoints: Endpoints,
        prompt_tokens: int,
        console: Console,
        interrupts: Interrupts,
    ) -> None:
        self.config = config
        self.plan = plan
        self.prompt_tokens = prompt_tokens
        self.console = console
        self.interrupts = interrupts
        self.endpoints = endpoints
        self.processes = LAUNCHERS[config.launch.cluster]()
        self.client = LauncherClient(self.endpoints)
        self.summary: dict[str, Any] = {}
        self.started_s = time.monotonic()
        self._last_step = -1
        self._last_evaluated = 0
        self._last_step_s = self.started_s
        self._stopping = False

    def conduct(self) -> int:
        """Starts everything, watches until the end, stops everything; gives the exit code."""
        error = ""
        code = EXIT_DONE
        try:
            self._start()
            self._watch()
            self._finish()
            if self._stopping:
                code = EXIT_INTERRUPTED
        except (RunError, PeerTimeoutError) as failure:
            error, code = str(failure), EXIT_FAILED
            log.error("run failed", error=error)
        finally:
            self.summary = self._summarize(code, error)
            self._shut_replay()
            self.processes.end(grace_s=FAILURE_GRACE_S)
            self.client.close()
        return code

    def _start(self) -> None:
        for role in ROLES:
            for index, share in enumerate(self.plan.of(role)):
                self._start_role(role, index, share)

    def _start_role(self, role: str, index: int, share: Share) -> RoleProcess:
        spec = RoleSpec(role, index, str(self.config.run_dir), self.endpoints, share.cpus, self.prompt_tokens)
        return self.processes.start(spec, share)

    def _watch(self) -> None:
        """Returns when all learners have ended well. Raises RunError or PeerTimeoutError otherwise."""
        learners = self.processes.of("learner")
        view = LiveView(
            self.console,
            run=self.config.run,
            steps=self.config.steps,
            max_staleness=self.config.replay.max_staleness,
        )
        next_status_s = 0.0
        with view:
            view.phase(f"starting {len(self.processes.roles)} roles ...")
            while any(role.code is None for role in learners):
                self._check_processes()
                self._check_interrupts()
                if time.monotonic() >= next_status_s:
                    status = self._status()
                    if status is not None:
                        self._check_progress(status)
                        if status["step"] > 0:
                            view.update(status)
                    next_status_s = time.monotonic() + STATUS_EVERY_S
                time.sleep(TICK_S)
            self._check_processes()
            view.update(self.client.status())

    def _check_processes(self) -> None:
        for role in self.processes.roles:
            code = role.code
            if code is None or (code == 0 and role.spec.role in ("learner", "critic")):
                continue
            if code == 0 and role.spec.role == "generator" and self.client.status()["done"]:
                continue
            raise RunError(role.cause())

    def _check_interrupts(self) -> None:
        if self.interrupts.count and not self._stopping:
            self._stopping = True
            self._stop_since_s = time.monotonic()
            self.console.print("stopping after this step (once more to stop at once) ...", highlight=False)
            self.client.stop("interrupted")
        if self._stopping:
            waited_s = time.monotonic() - self._stop_since_s
            if self.interrupts.count > 1:
                raise RunError("interrupted twice: stopped at once, the last step is not saved")
            if waited_s > self.config.launch.stop_timeout_s:
                names = ", ".join(role.name for role in self.processes.roles if role.code is None)
                raise RunError(f"still running {waited_s:.0f} s after the request to stop: {names}")

    def _status(self) -> dict[str, Any] | None:
        """The replay queue's status; None while it is starting."""
        try:
            return self.client.status()
        except PeerTimeoutError:
            self._check_processes()
            if self._last_step < 0 and time.monotonic() - self.started_s < self.config.launch.start_timeout_s:
                return None
            raise

    def _check_progress(self, status: dict[str, Any]) -> None:
        now_s = time.monotonic()
        evaluated = status["eval"]["prompts_done"]
        if (status["step"], evaluated) != (self._last_step, self._last_evaluated):
            self._last_step, self._last_evaluated, self._last_step_s = status["step"], evaluated, now_s
        launch = self.config.launch
        names = {f"generator-{index}" for index in range(launch.generators)}
        names |= {f"learner-{rank}" for rank in range(launch.learners)}
        missing = names - set(status["heard"])
        if missing and now_s - self.started_s > launch.start_timeout_s:
            raise RunError(
                f"not up after launch.start_timeout_s = {launch.start_timeout_s:g} s: {', '.join(sorted(missing))}"
            )
        if now_s - self._last_step_s > max(launch.progress_timeout_s, 0 if not missing else launch.start_timeout_s):
            raise RunError(
                f"no optimizer step ended within launch.progress_timeout_s = {launch.progress_timeout_s:g} s: step "
                f"{status['step']}, {status['leased']} groups leased, {status['finished']} waiting for the learner"
                + "".join(
                    f", evaluation of version {one['version']} at {one['done']} of {one['prompts']} prompts"
                    for one in status["eval"]["running"]
                )
            )

    def _finish(self) -> None:
        """Lets the generators end by themselves. Raises RunError when one does not."""
        left = self.processes.wait(self.processes.of("generator"), self.config.launch.stop_timeout_s)
        if left:
            names = ", ".join(role.name for role in left)
            raise RunError(f"still running {self.config.launch.stop_timeout_s:g} s after the last step: {names}")
        failed = [role for role in self.processes.roles if role.code not in (None, 0)]
        if failed:
            raise RunError(failed[0].cause())

    def _shut_replay(self) -> None:
        """Lets the replay process complete its trace; what hangs is ended afterwards."""
        replay = self.processes.of("replay")
        if replay and replay[0].code is None:
            try:
                self.client.shutdown()
            except PeerTimeoutError as error:
                log.warning("replay does not answer", error=str(error))
            self.processes.wait(replay, FAILURE_GRACE_S)

    def _summarize(self, code: int, error: str) -> dict[str, Any]:
        own: dict[str, Any] = {"status": STATUS_OF_EXIT[code], "wall_s": time.monotonic() - self.started_s}
        if error:
            own["error"] = error
        replay = self.processes.of("replay")
        if not replay or replay[0].code is not None:
            return own
        try:
            told = self.client.summary()
        except (PeerTimeoutError, RunError) as failure:
            log.warning("no summary from the replay queue", error=str(failure))
            return own
        idle = told["idle"]
        verdict = bottleneck(
            generator_idle=idle["generator"],
            learner_idle=idle["learner"],
            max_staleness=self.config.replay.max_staleness,
        )
        restarts = dict.fromkeys(("generator", "learner", "replay"), 0)
        return own | told | {"bottleneck": verdict, "restarts": restarts}


def show_end(console: Console, summary: dict[str, Any], folder: str, report: str) -> None:
    """Prints how the run ended."""
    style = {"finished": "green", "failed": "bold red", "stopped": "yellow"}[summary["status"]]
    console.print(f"[{style}]{summary['status']}[/] after {summary['wall_s']:.0f} s", highlight=False)
    if "error" in summary:
        console.print(summary["error"], style="red", highlight=False, markup=False, soft_wrap=True)
    if summary.get("reward_first") is not None:
        ledger, staleness, sync = summary["ledger"], summary["staleness"], summary["weight_sync"]
        refunded = ", ".join(f"{n} refunded ({reason})" for reason, n in ledger["refunded"].items())
        lines = [
            f"reward     {summary['reward_first']:.3f} -> {summary['reward_last']:.3f} in {summary['steps']} steps",
            f"throughput {summary['tokens_per_s']:,.0f} trained tokens/s, {summary['tokens_trained']:,} in all",
            f"staleness  mean {staleness['mean']:.2f}, max {staleness['max']} (limit {staleness['limit']})",
            f"weights    {sync['count']} broadcasts, engine stalled {sync['stall_ms_mean']:.1f} ms "
            f"(max {sync['stall_ms_max']:.1f})",
            f"ledger     {ledger['leased']} groups = {ledger['trained']} trained + "
            + (f"{refunded} + " if refunded else "")
            + f"{ledger['in_flight']} in flight",
            f"bottleneck {summary['bottleneck']}",
        ]
        if evaluations := summary.get("eval"):
            first, last = evaluations[0], evaluations[-1]
            versions = f"(version {first['version']} -> {last['version']})"
            lines.insert(1, f"eval       reward {first['reward']:.3f} -> {last['reward']:.3f} {versions}")
        for dropped in summary.get("eval_dropped", []):
            lines.append(f"eval       version {dropped['version']} dropped: {dropped['reason']}")
        if summary["skipped_rows"]:
            lines.append(f"skipped    {summary['skipped_rows']} prompts that are too long for the model's window")
        console.print("\n".join(lines), highlight=False, soft_wrap=True)
    console.print(f"folder     {folder}\nreport     {report}", highlight=False, soft_wrap=True)
