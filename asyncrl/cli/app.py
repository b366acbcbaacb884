"""The `asyncrl` command, to which the modules of this folder add theirs."""

from __future__ import annotations

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
