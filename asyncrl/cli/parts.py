"""Commands that print what a config can contain, and make datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from asyncrl.cli.app import OVERRIDES, app
from asyncrl.config.load import parse_override
from asyncrl.data.convert import CONVERTERS, SPLITS, convert, describe_skipped
from asyncrl.data.row_files import check_rows_file, write_rows
from asyncrl.data.rows import ground_truth_text
from asyncrl.errors import ConfigError

data = typer.Typer(help="Make datasets.", no_args_is_help=True)
app.add_typer(data, name="data")


@app.command(name="config")
def show_keys(
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    config: Annotated[
        str | None, typer.Option(help="YAML file, or the name of one in configs/; the defaults when not given.")
    ] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Only keys whose values are not the defaults.")] = False,
) -> None:
    """Print every key of a config: its value, default, allowed values and meaning. Exit code 2: bad configuration."""
    from asyncrl.cli.show_config import show_config

    show_config(config, dict(parse_override(text) for text in overrides or []), Console(), diff=diff)


@app.command(name="list")
def list_parts() -> None:
    """Print the parts that a config can name, with their options and defaults."""
    from asyncrl.launch.registry import print_parts

    print_parts(Console())


@data.command()
def verifiers(
    env: Annotated[str, typer.Option(help="Id of the environment, as in environment.name=verifiers:ID.")],
    out: Annotated[Path, typer.Option(help="Parquet file to write.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]...", help="Options of the environment, those of environment.options."),
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="Interpreter that has the library and the environment; this one when not set.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Only the first N rows; all when not set.")] = None,
) -> None:
    """Write the rows of a verifiers environment."""
    given = dict(parse_override(text) for text in options or [])
    written = make_verifiers_rows(env, out, python=python, limit=rows, options=given)
    print(f"{out}: {written} rows written")


def make_verifiers_rows(name: str, out: Path, *, python: str | None, limit: int | None, options: dict[str, Any]) -> int:
    """Writes the rows of the environment in verl's schema, each with the environment's row in `extra_info.verifiers`;
    returns their number. Raises ConfigError if the environment or its rows cannot be loaded, and DataError for a value
    that a row cannot hold."""
    from asyncrl.environments.programs.program import read_rows, verifiers_python

    check_rows_file(out)
    interpreter = verifiers_python(name, python)
    rows = [
        {
            "data_source": name,
            "prompt": found["prompt"],
            "ability": "agent",
            "reward_model": {
                "style": "rule",
                "ground_truth": ground_truth_text(found["ground_truth"], f"verifiers:{name}, row {index}: answer"),
            },
            "extra_info": {"index": index, "verifiers": found["row"]},
        }
        for index, found in enumerate(read_rows(name, options, python=interpreter, limit=limit))
    ]
    if not rows:
        raise ConfigError(f"verifiers:{name}: it has no rows")
    write_rows(out, rows)
    return len(rows)


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

    splits = ", ".join(SPLITS)
    data.command(name, help=f"Convert {converter.data_source} (splits: {splits}) to verl's schema.")(run)


for _name in CONVERTERS:
    _add_converter(_name)
