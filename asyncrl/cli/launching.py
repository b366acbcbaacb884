"""Commands that train and evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from asyncrl.cli.app import FOLDER, NAME_OR_FOLDER, OVERRIDES, app, run_folder
from asyncrl.config.load import load_config, parse_override, settings_of_model
from asyncrl.config.sections import expand_path
from asyncrl.errors import ConfigError

FLAGS = {
    "generators": "launch.generators",
    "learners": "launch.learners",
    "max_staleness": "replay.max_staleness",
    "steps": "steps",
    "run": "run",
    "cluster": "launch.cluster",
}
"""Flags of `launch`, and the config key that each one is short for."""


@app.command()
def launch(
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="YAML file, or the name of one in configs/. Without it: with --resume that of the run, with "
            "model.path and data.train none, otherwise demo."
        ),
    ] = None,
    generators: Annotated[int | None, typer.Option(help="Generator processes.")] = None,
    learners: Annotated[int | None, typer.Option(help="Learner ranks.")] = None,
    max_staleness: Annotated[int | None, typer.Option(help="Hard bound on token age, in learner steps.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run; its folder is runs/NAME.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Launcher of `asyncrl list`; slurm outside of a SLURM job submits one."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run of this name where it ended.")] = False,
    discard_journal: Annotated[
        bool,
        typer.Option("--discard-journal", help="Resume from the newest checkpoint alone; the journal is put aside."),
    ] = False,
    accept_data: Annotated[
        bool, typer.Option("--accept-data", help="With --resume: continue although the training rows have changed.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --cluster slurm: write and show the job without submitting it.")
    ] = False,
) -> None:
    """Train. Exit code 0: done, 1: the run failed, 2: bad configuration or data, 130: interrupted."""
    from asyncrl.launch.run import launch as launch_run
    from asyncrl.launch.run_dir import accept_rows, config_of_run
    from asyncrl.launch.slurm import in_job, submit

    flags: dict[str, Any] = {
        "generators": generators, "learners": learners, "max_staleness": max_staleness, "steps": steps, "run": run,
        "cluster": cluster,
    }  # fmt: skip
    settings = dict(parse_override(text) for text in overrides or [])
    settings |= {FLAGS[name]: value for name, value in flags.items() if value is not None}
    for flag, is_given in (("--discard-journal", discard_journal), ("--accept-data", accept_data)):
        if is_given and not resume:
            raise ConfigError(f"{flag}: is for a run that goes on; give --resume too")
    if resume:
        settings["resume"] = "must"
        config = config or str(config_of_run(settings.get("run", "run"), expand_path(settings.get("runs_dir", "runs"))))
    if config is None and not {"model.path", "data.train"} <= settings.keys():
        config = "demo"
    loaded, console = load_config(config, settings), Console()
    if accept_data:
        accept_rows(loaded.run_dir)
    if loaded.launch.cluster == "slurm" and not in_job():
        if discard_journal:
            raise ConfigError(
                "--discard-journal: would discard it at each start of the job; rename the journal's folder"
            )
        raise typer.Exit(submit(loaded, console, dry_run=dry_run))
    if dry_run:
        raise ConfigError("--dry-run: shows the job of --cluster slurm, outside of a job; leave it out")
    raise typer.Exit(launch_run(loaded, console, without_journal=discard_journal))


@app.command()
def scale(
    generators: Annotated[int, typer.Option(help="Generator processes from now on.")],
    run: Annotated[str, typer.Option(help=NAME_OR_FOLDER)] = "run",
) -> None:
    """Change the number of generators of a running run. Exit code 0: done, 1: it did not succeed, 2: unknown run."""
    from asyncrl.cli.running import scale as scale_run

    scale_run(run_folder(run), generators, Console())


@app.command()
def retrain(
    folder: Annotated[Path, FOLDER],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SECTION.KEY=VALUE]...",
            help="Settings of algorithm, learner and critic, launch.learners, or steps.",
        ),
    ] = None,
    start: Annotated[int, typer.Option(min=0, help="Step of the run's checkpoint to start from; 0: its model.")] = 0,
    samples: Annotated[
        Path | None, typer.Option(help="File of `asyncrl samples --out` with the trajectories to train, by step.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="New folder for the results; runs/NAME/retrained/1 and so on.")
    ] = None,
) -> None:
    """Train again on the batches of a run's journal, or on a selection, without generators. Exit code 0: done, 1:
    failed, or with unchanged settings the weights came out different, 2: bad configuration, 130: interrupted."""
    from asyncrl.cli.retrain import retrain as retrain_run

    settings = dict(parse_override(text) for text in overrides or [])
    raise typer.Exit(retrain_run(folder, settings, Console(), out=out, start_step=start, samples=samples))


@app.command(name="eval")
def evaluate(
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    config: Annotated[
        str | None, typer.Option(help="YAML file, or the name of one in configs/; demo, or with --model none.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model folder, or OWNER/NAME of the hub; runs/NAME/model of the run, else model.path."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(help="JSON file for the results, or Parquet file for the texts; may be given for both."),
    ] = None,
) -> None:
    """Evaluate a model on data.eval. Exit code 0: done, 1: failed, 2: bad configuration, 130: interrupted."""
    from asyncrl.cli.evaluate import evaluate as evaluate_model

    settings = dict(parse_override(text) for text in overrides or [])
    settings |= {"run": run} if run is not None else {}
    if config is None and model is not None and run is None:
        settings = settings_of_model(model, settings)
    else:
        config = config or "demo"
    raise typer.Exit(evaluate_model(load_config(config, settings), Console(), model=model, outs=out or ()))


@app.command()
def play(
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    config: Annotated[str, typer.Option(help="YAML file, or the name of one in configs/.")] = "calculator",
    rows: Annotated[int, typer.Option(min=1, help="Rows of the training data to play.")] = 3,
    say: Annotated[
        list[str] | None,
        typer.Option(help="What the policy says, in place of the model; may be given for each turn, and repeats."),
    ] = None,
    typed: Annotated[bool, typer.Option("--typed", help="Play the policy yourself.")] = False,
) -> None:
    """Play episodes of an environment and print them. Exit code 0: done, 1: an environment failed, 2: bad
    configuration."""
    from asyncrl.cli.play import play as play_rows

    settings = dict(parse_override(text) for text in overrides or [])
    raise typer.Exit(play_rows(load_config(config, settings), Console(), rows=rows, say=say or [], typed=typed))
