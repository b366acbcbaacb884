"""The CURVE keys of a run whose sockets leave this machine: one pair for servers, one for clients.

New keys are generated for each run, in a file that only its owner can read, outside the run's folder. The launcher
holds a lock on the file and removes it at the end; files that no launcher holds any more are removed by the next one.
Any process that can read the file can join the run.
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
"""Length of a CURVE key as Z85 text."""


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
    """True if data sent to this IP address stays on the machine."""
    return ipaddress.ip_address(host).is_loopback


def write_keys(run_id: str) -> Path:
    """Generates keys and writes them to the run's key file, which only its owner can read. Returns the file."""
    path, lock = _write(run_id)
    os.close(lock)
    return path


def _write(run_id: str) -> tuple[Path, int]:
    """Returns a new key file and the descriptor that holds its lock. It gets its name after it is locked: otherwise
    another launch would take it for an abandoned one."""
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
    """Removes key files that no process has locked."""
    for path in Path(FOLDER).expanduser().glob("*.json"):
        with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:  # removed since, or in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)


def read_keys(path: str) -> Keys:
    """Returns the keys in a file of `write_keys`; logs redact them from now on. Raises ConfigError if the file is
    missing, malformed, or readable by others than its owner."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(
            f"key file {path}: {error.strerror}; it exists while its run continues, on the machine of its launcher"
        ) from None
    with os.fdopen(file) as stream:
        mode = stat.S_IMODE(os.fstat(file).st_mode)
        if mode & 0o077:
            raise ConfigError(
                f"key file {path}: mode {mode:o} lets others than its owner read the keys; chmod 600 {path}"
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
        raise ConfigError(f"key file {path}: not the JSON of {', '.join(names)}; start the run again to get new keys")
    return Keys(**values)
