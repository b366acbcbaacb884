"""Commands that predict, compare and measure."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from asyncrl.cli.app import OVERRIDES, app
from asyncrl.errors import ConfigError
from asyncrl.util.processes import PYTHON

REPOSITORY = Path(__file__).parents[2]
FROM = typer.Option("--from", help="Folder of a run, runs/NAME, or its trace.parquet.")


@app.command()
def simulate(
    run: Annotated[Path | None, FROM] = None,
    generators: Annotated[int | None, typer.Option(help="Generators; with --from that of the run, as below.")] = None,
    learners: Annotated[int | None, typer.Option(help="Learner ranks.")] = None,
    max_staleness: Annotated[int | None, typer.Option(help="Hard bound on token age, in learner steps.")] = None,
    groups_per_step: Annotated[int | None, typer.Option(help="Groups in the batch of a step.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Trajectories of a prompt.")] = None,
    max_running_groups: Annotated[int | None, typer.Option(help="Groups that a generator works on at once.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longer completions are cut.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    generators_per_device: Annotated[int | None, typer.Option(help="Generators that take turns on a device.")] = None,
    zero_variance: Annotated[
        str | None, typer.Option(help="Groups without signal: refund, train or drop; refund, or that of the run.")
    ] = None,
    max_episodes: Annotated[int | None, typer.Option(help="Episodes that a generator plays at once.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the lengths that are drawn.")] = 0,
    numbers: Annotated[
        list[str] | None,
        typer.Argument(
            help="Without --from: the job as KEY=VALUE, with mean_tokens, engine_base_ms and learner_token_us at least."
        ),
    ] = None,
) -> None:
    """Predict throughput, idle time and staleness of a run with other settings. Exit code 2: it cannot be predicted."""
    from asyncrl.plan.show import show_simulation

    changes = {
        "generators": generators, "learners": learners, "max_staleness": max_staleness,
        "groups_per_step": groups_per_step, "group_size": group_size, "max_running_groups": max_running_groups,
        "max_new_tokens": max_new_tokens, "steps": steps, "generators_per_device": generators_per_device,
        "zero_variance": zero_variance, "max_episodes": max_episodes,
    }  # fmt: skip
    changed = {name: value for name, value in changes.items() if value is not None}
    show_simulation(Console(), run, numbers or [], changed, seed=seed)


@app.command()
def plan(
    run: Annotated[Path | None, FROM] = None,
    devices: Annotated[
        int | None, typer.Option(help="GPUs, or cores, to split between generators and learners.")
    ] = None,
    max_staleness: Annotated[int, typer.Option(help="Highest staleness limit to consider.")] = 8,
    model: Annotated[str | None, typer.Option(help="Folder of a model, to find a layout for --gpus.")] = None,
    gpus: Annotated[str | None, typer.Option(help="Cards for --model, such as 8xH100-80.")] = None,
    config: Annotated[
        str | None, typer.Option(help="With --model: YAML file, or one in configs/, whose other keys are kept.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With --model: file for the config; else it is printed.")] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=64, help="With --model: longest trajectory; that of --config, or 8192."),
    ] = None,
) -> None:
    """Find the split of the devices, and the staleness limit, that would train the most tokens with signal per second.
    With --model: a layout that fits the memory of the cards. Exit code 2:
    there is none."""
    if model is not None and run is None:
        from asyncrl.launch.gpu_layout import show_layout

        if gpus is None:
            raise ConfigError("--gpus: is missing, as in --gpus 8xH100-80")
        show_layout(Console(), model, gpus, base=config, out=out, tokens=tokens)
        return
    if run is None or devices is None:
        raise ConfigError(f"--{'from' if run is None else 'devices'}: is missing; or use --model, which needs no run")
    from asyncrl.plan.show import show_plan

    show_plan(Console(), run, devices=devices, max_staleness=max_staleness)


@app.command()
def sweep(
    max_staleness: Annotated[str, typer.Option(help="Limits to try, as in 0,1,2,4,8.")],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    seeds: Annotated[int, typer.Option(help="Trainings of each limit.")] = 3,
    config: Annotated[str, typer.Option(help="YAML file, or the name of one in configs/.")] = "demo",
    name: Annotated[str, typer.Option(help="Of the sweep; its cells are runs/NAME-s0-seed0 and so on.")] = "sweep",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of each training.")] = None,
) -> None:
    """Train with several staleness limits and say which to take; again to resume. Exit code 0: done, 1: a training
    failed, 2: bad configuration, 130: interrupted."""
    from asyncrl.plan.sweep import sweep as sweep_runs

    arguments = [*(overrides or []), *([f"steps={steps}"] if steps is not None else [])]
    raise typer.Exit(sweep_runs(name, config, arguments, max_staleness, seeds, Console()))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Measure the hot paths against their limits and against other systems; --help describes the rows."""
    if not (REPOSITORY / "benchmarks" / "__main__.py").is_file():
        raise ConfigError(
            "asyncrl bench: the benchmarks are in the repository, not in the installed package; clone it, and run "
            "make setup and .venv/bin/asyncrl bench there"
        )
    # The process becomes `python -m benchmarks`, so that signals reach it.
    environment = os.environ | {"PYTHONPATH": python_path()}
    os.execve(sys.executable, [*PYTHON, "-m", "benchmarks", *context.args], environment)


def python_path() -> str:
    """Returns PYTHONPATH with this checkout first."""
    return os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
