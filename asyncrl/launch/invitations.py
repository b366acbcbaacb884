"""Invitations of guests: `asyncrl invite` issues a machine a key of its own, and takes it back.

The table of guests in the run folder has their public keys only. With the first invitation the key pair and the port of
the replay queue are kept there too, so that guests find a resumed run again.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from asyncrl.config import Config, load_config
from asyncrl.errors import ConfigError
from asyncrl.launch.reception import GUESTS
from asyncrl.launch.run_dir import check_resume, is_running, read_endpoints
from asyncrl.replay.guests import transport_problem
from asyncrl.types import FIRST_GUEST
from asyncrl.util.files import read_json, replace_file
from asyncrl.wire.bounds import MAX_INDEX
from asyncrl.wire.curve_keys import KEY_CHARACTERS, Keys, new_pair, read_keys
from asyncrl.wire.guests import read_guests

T = TypeVar("T", "ReplayServer", "GuestKey")
SERVER = "server_key.json"
"""File with the key pair and the address of the replay queue, in the folder of a run that has guests."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
MAX_GENERATORS = 256
"""Maximum number of generators of a guest."""


@dataclass(frozen=True, slots=True)
class ReplayServer:
    """The part of the replay queue that lives as long as the run."""

    public: str
    secret: str
    address: str
    """ZeroMQ address at the last launch."""

    @property
    def port(self) -> int:
        return urlsplit(self.address).port or 0


@dataclass(frozen=True, slots=True)
class GuestKey:
    """The content of a guest's key file. It has no secret of the run."""

    run: str
    name: str
    address: str
    """ZeroMQ address of the replay queue when the guest was invited."""
    server_public: str
    client_public: str
    client_secret: str

    @property
    def keys(self) -> str:
        """The keys as endpoints have them."""
        return json.dumps(asdict(Keys(self.server_public, "", self.client_public, self.client_secret)))


def invite(run_dir: Path, name: str, generators: int) -> GuestKey:
    """Adds a guest to a run. Raises ConfigError if the run cannot have guests, or has one of this name."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: must be up to 40 letters, digits and . _ -, such as lab")
    if not 1 <= generators <= MAX_GENERATORS:
        raise ConfigError(f"--generators {generators}: must be 1 to {MAX_GENERATORS}")
    server = _server(run_dir)
    if problem := transport_problem(load_config(run_dir / "config.yaml")):
        raise ConfigError(f"{run_dir}: {problem}")
    table = _read_table(run_dir)
    if name in table["guests"]:
        raise ConfigError(f"--name {name!r}: the run has a guest of this name; use another, or --revoke it first")
    first = table["next_index"]
    if first + generators > MAX_INDEX:
        raise ConfigError(f"{run_dir}: the run has had too many guests; start a new one")
    public, secret = new_pair()
    table["guests"][name] = {"key": public, "first": first, "generators": generators}
    table["next_index"] = first + generators
    replace_file(run_dir / SERVER, json.dumps(asdict(server)) + "\n", mode=0o600)
    _write_table(run_dir, table)
    return GuestKey(run_dir.name, name, server.address, server.public, public, secret)


def revoke(run_dir: Path, name: str) -> None:
    """Removes a guest: the replay queue does not hear it from now on. Raises ConfigError if there is none."""
    table = _read_table(run_dir)
    if name not in table["guests"]:
        known = ", ".join(table["guests"]) or "none"
        raise ConfigError(f"--revoke {name!r}: the run in {run_dir} has no guest of this name (of {known})")
    del table["guests"][name]
    _write_table(run_dir, table)


def kept_server(config: Config) -> ReplayServer | None:
    """Returns the keys and the address of the replay queue that a resumed run has to have again; None if it has no
    guests, or is a new one."""
    file = config.run_dir / SERVER
    if not file.is_file() or not check_resume(config):
        return None
    return _of(ReplayServer, read_json(file), file)


def read_key(file: Path) -> GuestKey:
    """Returns the content of a guest's key file. Raises ConfigError if it is not one, or others can read it."""
    key = _of(GuestKey, read_json(file, "--key"), file)
    if file.stat().st_mode & 0o077:
        raise ConfigError(f"--key {file}: other users can read it; chmod 600 {file}")
    if any(len(one) != KEY_CHARACTERS for one in (key.server_public, key.client_public, key.client_secret)):
        raise ConfigError(f"--key {file}: is cut off; copy it again")
    return key


def _server(run_dir: Path) -> ReplayServer:
    """The server that a guest connects to. Raises ConfigError if there is none that another machine reaches."""
    file = run_dir / SERVER
    if file.is_file() and not is_running(run_dir):
        return _of(ReplayServer, read_json(file), file)
    endpoints = read_endpoints(run_dir)
    if not endpoints.keys:
        raise ConfigError(
            f"{run_dir}: other machines do not reach this run; start it with launch.address=ADDRESS:PORT, an address "
            "of this machine that the guest reaches"
        )
    keys = read_keys(endpoints.keys)
    return ReplayServer(keys.server_public, keys.server_secret, endpoints.replay)


def _read_table(run_dir: Path) -> dict[str, Any]:
    file = run_dir / GUESTS
    if not file.is_file():
        return {"next_index": FIRST_GUEST, "guests": {}}
    try:
        return read_guests(file)[1]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{file}: not a table of guests ({error!r}); remove it, and invite all guests again"
        ) from None


def _write_table(run_dir: Path, table: dict[str, Any]) -> None:
    replace_file(run_dir / GUESTS, json.dumps(table, indent=2) + "\n", mode=0o600)


def _of(kind: type[T], values: dict[str, Any], file: Path) -> T:
    """The object with these values, which are texts. Raises ConfigError if they are others."""
    names = sorted(field.name for field in fields(kind))
    if sorted(values) != names or not all(isinstance(value, str) for value in values.values()):
        raise ConfigError(f"{file}: is not the JSON of {', '.join(names)}; was it written by asyncrl invite?")
    return kind(**values)
