"""The `asyncrl` command, to which the modules of this folder add theirs."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer(
    name="asyncrl",
    help="Asynchronous, off-policy, streaming RL training for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

OVERRIDES = typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings over those of the file.")
FOLDER = typer.Argument(help="Folder of the run, runs/NAME.")
NAME_OR_FOLDER = "Name of the run in runs/, or the path of its folder."


def run_folder(run: str) -> Path:
    """The folder of a run that is given by its name, which is in runs/, or by a path."""
    return Path("runs") / run if Path(run).name == run else Path(run)
