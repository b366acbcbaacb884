"""Commands for guests: machines that join a run by hand."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from asyncrl.cli.app import app
from asyncrl.errors import ConfigError
from asyncrl.util.files import check_writable, replace_file

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@app.command()
def invite(
    name: Annotated[str | None, typer.Option(help="Name of the guest, for logs and --revoke.")] = None,
    generators: Annotated[int, typer.Option(help="Maximum number of its generators.")] = 1,
    run: Annotated[str, typer.Option(help="Name of the run in runs/, or the path of its folder.")] = "run",
    out: Annotated[Path | None, typer.Option(help="New file for the key, of mode 0600; standard output.")] = None,
    revoke: Annotated[str | None, typer.Option(help="Name of a guest that is not admitted any more.")] = None,
) -> None:
    """Invite another machine to generate for a run: makes its key. Exit code 0: done, 2: no such run, or one that other
    machines do not reach."""
    from asyncrl.launch.invitations import invite as invite_guest
    from asyncrl.launch.invitations import revoke as revoke_guest

    run_dir = Path("runs") / run if Path(run).name == run else Path(run)
    if (name is None) == (revoke is None):
        raise ConfigError("give --name for a new guest, or --revoke for one that is to leave")
    if revoke is not None:
        revoke_guest(run_dir, revoke)
        print(f"{revoke} is not admitted any more")
    elif name is not None:
        if out is not None:
            check_new(out)
        text = json.dumps(asdict(invite_guest(run_dir, name, generators)), indent=2)
        if out is None:
            print(text)
        else:
            replace_file(out, text + "\n", mode=0o600)
            print(f"{out}: the key of {name}; copy it to the guest and start there: asyncrl join --key {out.name}")


@app.command()
def join(
    key: Annotated[Path, typer.Option(help="The file that asyncrl invite printed; mode 0600.")],
    address: Annotated[
        str, typer.Argument(metavar="[tcp://HOST:PORT]", help="Of the run, if it is not that of the key.")
    ] = "",
    generators: Annotated[
        int | None, typer.Option(min=1, help="Generator processes; as many as the invitation allows.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder of the run's model, if it has another path here.")] = None,
    patience: Annotated[str, typer.Option(help="How long to wait for a run that does not answer: 90s, 5m, 1h.")] = "1h",
) -> None:
    """Generate for a run on another machine. Exit code 0: the run is over, 1: failed, 2: this machine cannot join, 130:
    interrupted; then its leases are handed back."""
    from asyncrl.launch.commands.join import join as join_run

    if address and not re.fullmatch(r"tcp://[^\s/:]+:\d{1,5}", address):
        raise ConfigError(f"{address}: is not an address such as tcp://10.0.0.1:29500")
    code = join_run(
        address, key, Console(), generators=generators, model=model, patience_s=read_seconds("--patience", patience)
    )
    raise typer.Exit(code)


def check_new(file: Path) -> None:
    """Raises ConfigError if the file exists or cannot be written."""
    if file.exists():
        raise ConfigError(f"--out {file}: exists; give another name, or remove it")
    check_writable(file, "--out")


def read_seconds(option: str, text: str) -> float:
    """Returns the seconds of a time such as 90s or 1h. Raises ConfigError for another text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise ConfigError(f"{option} {text}: is not a time such as 90s, 5m or 1h")
    return float(match[1]) * SECONDS[match[2]]
