"""The CURVE keys of a run whose sockets leave this machine: one pair for those that listen, one for those that call.

They are made anew for each run, in a file that only its owner can read, outside the run's folder. The launcher holds a
lock on the file and removes it at the end; files that no launcher holds any more are removed by the next one. Whoever
has the file is part of the run.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zmq

from asyncrl.errors import ConfigError
from asyncrl.util.redaction import keep_secret

FOLDER = "~/.asyncrl/keys"
OWNER_ONLY = 0o600
KEY_CHARACTERS = 40
"""Of a CURVE key as Z85 text."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Two CURVE key pairs as Z85 text."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str


@contextmanager
def run_keys(run_id: str) -> Iterator[Path]:
    """A file with new keys, which exists during the block; those of launchers that were killed are removed."""
    _remove_abandoned()
    path, lock = _write(run_id)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def is_loopback(host: str) -> bool:
    """Whether what is sent to this IP address stays on the machine."""
    return ipaddress.ip_address(host).is_loopback


def write_keys(run_id: str) -> Path:
    """Makes keys and writes them to the run's key file, which only its owner can read at any time; gives the file."""
    path, lock = _write(run_id)
    os.close(lock)
    return path


def _write(run_id: str) -> tuple[Path, int]:
    """A new key file and the descriptor that holds its lock. It gets its name when it is locked: before, another launch
    would take it for an abandoned one."""
    folder = Path(FOLDER).expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    path, new = folder / f"{run_id}.json", folder / f"{run_id}.new"
    new.unlink(missing_ok=True)  # of a launcher that was killed
    pairs = (*zmq.curve_keypair(), *zmq.curve_keypair())
    keys = Keys(*(key.decode() for key in pairs))
    lock = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, OWNER_ONLY)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(lock, json.dumps(asdict(keys)).encode())
    new.replace(path)
    return path, lock


def _remove_abandoned() -> None:
    """Removes key files that no process holds the lock of."""
    for path in Path(FOLDER).expanduser().glob("*.json"):
        with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:  # removed since, or in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)


def read_keys(path: str) -> Keys:
    """The keys in a file that `write_keys` made; logs hide them from now on. Raises ConfigError when the file is not
    there, does not hold keys, or others than its owner may read it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(
            f"key file {path}: {error.strerror}; it exists while its run goes on, on the machine of its launcher"
        ) from None
    with os.fdopen(file) as stream:
        mode = stat.S_IMODE(os.fstat(file).st_mode)
        if mode & 0o077:
            raise ConfigError(
                f"key file {path}: mode {mode:o} lets others than its owner at the keys; chmod 600 {path}"
            )
        text = stream.read()
    keys = _parse(path, text)
    for secret in (keys.server_secret, keys.client_secret):
        keep_secret(secret)
    return keys


def _parse(path: str, text: str) -> Keys:
    try:
        values: Any = json.loads(text)
    except ValueError:
        values = None
    names = list(Keys.__slots__)
    if (
        not isinstance(values, dict)
        or sorted(values) != sorted(names)
        or not all(isinstance(key, str) and len(key) == KEY_CHARACTERS for key in values.values())
    ):
        raise ConfigError(f"key file {path}: not the JSON of {', '.join(names)}; start the run again to have new keys")
    return Keys(**values)
