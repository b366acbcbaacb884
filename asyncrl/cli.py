"""The `asyncrl` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from asyncrl.config import load_config, parse_override
from asyncrl.data.convert import CONVERTERS, convert, describe_skipped
from asyncrl.errors import AsyncrlError, ConfigError, DataError

app = typer.Typer(
    name="asyncrl",
    help="Asynchronous, off-policy, streaming RL training for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data = typer.Typer(help="Make datasets and small models.", no_args_is_help=True)
app.add_typer(data, name="data")

EXIT_CONFIG = 2

FLAGS = {
    "generators": "launch.generators",
    "learners": "launch.learners",
    "max_staleness": "replay.max_staleness",
    "steps": "steps",
    "run": "run",
}
"""Flags of `launch`, and the config key that each one is short for."""


@app.command()
def launch(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings over those of the file.")
    ] = None,
    config: Annotated[str, typer.Option(help="YAML file, or the name of one in configs/.")] = "demo",
    generators: Annotated[int | None, typer.Option(help="Generator processes.")] = None,
    learners: Annotated[int | None, typer.Option(help="Learner ranks.")] = None,
    max_staleness: Annotated[int | None, typer.Option(help="Hard bound on token age, in learner steps.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run; its folder is runs/NAME.")] = None,
) -> None:
    """Train. Exit code 0: done, 1: the run failed, 2: bad configuration or data, 130: interrupted."""
    from asyncrl.launch.run import launch as launch_run

    flags: dict[str, Any] = {
        "generators": generators, "learners": learners, "max_staleness": max_staleness, "steps": steps, "run": run,
    }  # fmt: skip
    settings = dict(parse_override(text) for text in overrides or [])
    settings |= {FLAGS[name]: value for name, value in flags.items() if value is not None}
    raise typer.Exit(launch_run(load_config(config, settings), Console()))


@app.command(name="eval")
def evaluate(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings over those of the file.")
    ] = None,
    config: Annotated[str, typer.Option(help="YAML file, or the name of one in configs/.")] = "demo",
    model: Annotated[
        str | None, typer.Option(help="Model folder; runs/NAME/model of the config's run, else model.path.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the results to.")] = None,
) -> None:
    """Evaluate a model on data.eval. Exit code 0: done, 1: failed, 2: bad configuration, 130: interrupted."""
    from asyncrl.launch.evaluate import evaluate as evaluate_model

    settings = dict(parse_override(text) for text in overrides or [])
    settings |= {"run": run} if run is not None else {}
    raise typer.Exit(evaluate_model(load_config(config, settings), Console(), model=model, out=out))


@app.command(name="list")
def list_parts() -> None:
    """Print the parts that a config can name, with their options and defaults."""
    from asyncrl.launch.parts import print_parts

    print_parts(Console())


@data.command()
def arithmetic(
    out: Annotated[Path, typer.Argument(help="Parquet file to write.")],
    seed: Annotated[int, typer.Option(help="Seed of the shuffle.")] = 0,
    rows: Annotated[int | None, typer.Option(min=1, help="Only the first so many rows; all sums when not set.")] = None,
) -> None:
    """Make the arithmetic dataset of the demo."""
    from asyncrl.data.arithmetic import make_arithmetic

    make_arithmetic(out, seed=seed, rows=rows)


@data.command()
def tiny_model(
    out: Annotated[Path, typer.Argument(help="Folder to write the model and its tokenizer to.")],
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the warm start.")] = 0,
) -> None:
    """Make the tiny, warm-started model of the demo."""
    from asyncrl.data.tiny_model import make_tiny_model

    make_tiny_model(out, seed=seed)


def _add_converter(name: str) -> None:
    converter = CONVERTERS[name]

    def run(
        folder: Annotated[Path, typer.Option("--from", help="Folder that the dataset was downloaded to.")],
        out: Annotated[Path, typer.Option(help="Parquet file to write.")],
        split: Annotated[str, typer.Option(help="Part of the dataset to convert.")] = "train",
        instruction: Annotated[
            str, typer.Option(help="Appended to the question; empty for nothing.")
        ] = converter.instruction,
    ) -> None:
        written, skipped = convert(name, folder, out, split=split, instruction=instruction)
        print(f"{out}: {written} rows written, {describe_skipped(skipped)}")

    splits = ", ".join(converter.splits)
    data.command(name, help=f"Convert {converter.data_source} (splits: {splits}) to verl's schema.")(run)


for _name in CONVERTERS:
    _add_converter(_name)


def main() -> None:
    """Runs the command; errors made on purpose are printed without a traceback."""
    try:
        app()
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except AsyncrlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
