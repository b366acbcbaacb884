"""Commands that show a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from asyncrl.cli.app import FOLDER, NAME_OR_FOLDER, app, run_folder
from asyncrl.errors import ConfigError


@app.command()
def ledger(folder: Annotated[Path, FOLDER]) -> None:
    """Account for every group, trajectory and token of a run. Exit code 0: they add up, 1: not, 2: unknown run."""
    from asyncrl.cli.show_ledger import show_ledger

    raise typer.Exit(0 if show_ledger(folder, Console()) else 1)


@app.command()
def top(folder: Annotated[Path, FOLDER]) -> None:
    """Watch a running run from another terminal. Ctrl-C ends the view, not the run."""
    from asyncrl.cli.running import top as show_top

    show_top(folder, Console())


@app.command()
def logs(
    run: Annotated[str, typer.Argument(help=NAME_OR_FOLDER)],
    roles: Annotated[
        list[str] | None, typer.Argument(metavar="[ROLE]...", help="As in generator or generator-1; all roles.")
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run has ended, or Ctrl-C.")] = False,
    level: Annotated[str, typer.Option(help="Lowest level: debug, info, warning, error or critical.")] = "debug",
) -> None:
    """Print the logs of a run's roles, by time. Exit code 2: unknown run or role."""
    from asyncrl.cli.show_logs import show_logs

    show_logs(run_folder(run), roles or (), Console(), follow=follow, level=level)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, runs/NAME.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write; of one run its report.html, of several ./report.html.")
    ] = None,
) -> None:
    """Write a page about a run, finished or in progress, or one that compares several. Exit code 2: unknown run."""
    from asyncrl.observe.run_report import report_on

    report_on(folders, out, Console())


@app.command()
def board(
    folder: Annotated[Path, typer.Argument(metavar="[RUNS_DIR]", help="Folder that has the runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: a free one.")] = 0,
) -> None:
    """Serve a page over all runs, live, to this machine only: the list, one run, or several compared. Prints its
    address; Ctrl-C ends it. Exit code 2: unknown folder, or the port is taken."""
    from asyncrl.observe.board import serve_board

    serve_board(folder, port, Console())


@app.command()
def samples(
    folder: Annotated[Path, FOLDER],
    step: Annotated[str | None, typer.Option(help="Step, or first and last step as in 10:20; the last one.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest rewards first.")] = False,
    longest: Annotated[bool, typer.Option("--longest", help="The longest completions first.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Only those whose reward could not be computed.")] = False,
    evaluated: Annotated[
        bool, typer.Option("--eval", help="Those of evaluations; --step is the version, by default the last one.")
    ] = False,
    refunded: Annotated[bool, typer.Option("--refunded", help="Those of refunded groups, the newest first.")] = False,
    source: Annotated[str | None, typer.Option(help="Only those of this data source.")] = None,
    row: Annotated[int | None, typer.Option(min=0, help="Only those of this row of the dataset.")] = None,
    grep: Annotated[str | None, typer.Option(help="Only completions that contain this regular expression.")] = None,
    number: Annotated[int, typer.Option("-n", min=1, help="Number of samples to print.")] = 5,
    special_tokens: Annotated[bool, typer.Option("--special-tokens", help="Print special tokens, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per line.")] = False,
    out: Annotated[Path | None, typer.Option(help="Parquet file to write them to, with their tokens.")] = None,
) -> None:
    """Print what the model has written, with rewards: of the last step, or of all steps that match. Exit code 2: the
    run is unknown, or stores no trajectories."""
    from asyncrl.cli.show_samples import show_samples
    from asyncrl.observe.sample_search import Order, Query, parse_steps

    flags: list[tuple[Order, bool]] = [("best", best), ("worst", worst), ("longest", longest)]
    orders: list[Order] = [name for name, chosen in flags if chosen]
    if evaluated and refunded:
        raise ConfigError("--eval and --refunded: choose one of them")
    if len(orders) > 1:
        raise ConfigError(f"--{orders[0]} and --{orders[1]}: choose one of them")
    query = Query(
        steps=None if step is None else parse_steps(step),
        evaluated=evaluated,
        refunded=refunded,
        failed=failed,
        data_source=source,
        row=row,
        grep=grep,
        order=orders[0] if orders else "newest",
        limit=number,
    )
    show_samples(folder, query, Console(), special_tokens=special_tokens, as_json=as_json, out=out)


@app.command()
def show(
    folder: Annotated[Path, FOLDER],
    ticket: Annotated[int, typer.Argument(min=0, help="Ticket of the group, as `asyncrl samples` prints it.")],
    special_tokens: Annotated[bool, typer.Option("--special-tokens", help="Print special tokens, too.")] = False,
) -> None:
    """Print one group: its prompt, and every completion with its reward. Exit code 2: it is not stored."""
    from asyncrl.cli.show_samples import show_group

    show_group(folder, ticket, Console(), special_tokens=special_tokens)
