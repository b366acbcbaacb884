"""`asyncrl launch`: one run, from the checks to the summary.

launch()     find the hosts, check the config, place the roles, lock runs/<name>
  Run.run()  the run in progress (`watch.py`)
  summary.json, report.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict

from rich.console import Console

from asyncrl.config import Config
from asyncrl.data.hub import fetch
from asyncrl.generator.vllm_backend.setup import check_cpu
from asyncrl.launch.console import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Interrupts,
    ignore_broken_pipe,
)
from asyncrl.launch.documents import report_end
from asyncrl.launch.endpoints import run_endpoints
from asyncrl.launch.fork_server import ForkServer
from asyncrl.launch.launcher import Launcher
from asyncrl.launch.local import LocalLauncher, find_launcher
from asyncrl.launch.preflight import check_inputs, check_machine, length_of, run_recipes, with_start_deadline
from asyncrl.launch.resources.fit import fit_memory
from asyncrl.launch.resources.placement import Placement, check_run_dir, check_transport, place_roles
from asyncrl.launch.resources.staging import choose_staging
from asyncrl.launch.rollback import config_to_resume, is_due, resume_point
from asyncrl.launch.row_checks import PromptScan
from asyncrl.launch.run_dir import RunFolder, check_resume, nothing_to_resume
from asyncrl.launch.watch import Run
from asyncrl.launch.worker import RoleSpec
from asyncrl.observe.logs import configure_logs
from asyncrl.rewards.reward_model import uses_reward_model


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
            code, goes_on = _launch(
                config, console, launcher, reward_model=reward_model, without_journal=without_journal
            )
            if not goes_on:
                return code
            config, without_journal = config_to_resume(config), False


def _launch(
    config: Config, console: Console, launcher: Launcher, *, reward_model: bool, without_journal: bool
) -> tuple[int, bool]:
    """`launch` on the hosts of the launcher. Returns the exit code, and whether a rollback follows."""
    hosts = launcher.hosts()
    placement = place_roles(config, reward_model=reward_model, hosts=hosts)
    check_run_dir(config, placement, hosts)
    check_machine(config, placement, hosts)
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
            console.print(staging, highlight=False, soft_wrap=True)
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
            PromptScan(config, limit_tokens=inputs.prompt_tokens, has_trained=bool(folder.earlier_s)) as scan,
        ):
            config, checkpoint = resume_point(folder.path, config, console, without_journal=without_journal)
            folder.begin(config, endpoints, hosts)
            configure_logs(folder.path, "launcher")
            for file in folder.changed:
                console.print(
                    f"warning: {file} has changed since the run was last started", markup=False, soft_wrap=True
                )
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
            inputs.first_row.show(console)
            for name, text in launcher.describe().items():
                console.print(f"{name:10} {text}", highlight=False, soft_wrap=True)
            run = Run(config, placement, spec, console, interrupts, launcher, scan)
            code = run.run()
            goes_on = code == EXIT_FAILED and not interrupts.count and is_due(config, folder.summary(run.summary))
            start = {"start": asdict(inputs.first_row), "rows": scan.summary}
            report_end(run, folder, Console(quiet=True) if goes_on else console, start)
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
