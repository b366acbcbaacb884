"""Atomic file replacement that survives a kill or a power loss, and checked reading of files that the user named."""

from __future__ import annotations

import errno
import json
import os
import struct
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError

DESCRIPTORS_S = 10.0
"""Maximum wait for a file descriptor: longer than peers without keys may hold them (`wire/sockets.py`)."""
READ_BYTES = 1 << 18
"""Buffer for reading lines."""
MAX_TENSOR_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file, as in the format's own library."""

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""Names of the file with a model's weights, and of the index of several such files."""
WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".npz", ".onnx", ".onnx_data", ".ot",
)  # fmt: skip
"""Ends of the names of files with weights in a model's folder."""


def open_file(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """`os.open`, also as an `opener`, for files without which a run ends: while the process has no free descriptor it
    waits, at most DESCRIPTORS_S. Raises OSError."""
    deadline_s = time.monotonic() + DESCRIPTORS_S
    while True:
        try:
            return os.open(path, flags, mode)
        except OSError as error:
            if error.errno != errno.EMFILE or time.monotonic() > deadline_s:
                raise
        time.sleep(0.01)


def replace_file(path: Path, content: str | bytes, *, mode: int = 0o666, durable: bool = True) -> None:
    """Replaces the file atomically, text as UTF-8, and syncs it to the disk if it is to be `durable`; it has this mode,
    less the umask. Raises OSError that names the file."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # a full disk is found out by a call that has no name
        raise
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def read_lines(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yields the complete lines of a file after this many bytes, with their ends; none if the file does not exist."""
    try:
        with path.open("rb", buffering=READ_BYTES) as file:
            file.seek(offset)
            for line in file:
                if line.endswith(b"\n"):
                    yield line
    except (FileNotFoundError, NotADirectoryError):
        return


def read_last_lines(path: Path, num_bytes: int) -> list[bytes]:
    """The complete lines in the last bytes of a file, with their ends; none if the file does not exist."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        begin = max(0, os.fstat(file.fileno()).st_size - num_bytes)
        file.seek(begin)
        lines = file.read().splitlines(keepends=True)
    return [line for line in lines[1 if begin else 0 :] if line.endswith(b"\n")]


def cut_unfinished_line(path: Path) -> int:
    """Cuts off a last line without its end, which a killed process or a full disk left; returns its bytes."""
    size = path.stat().st_size if path.is_file() else 0
    if not size:
        return 0
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() == b"\n":
            return 0
        begin, newline = size, -1
        while begin and newline < 0:
            begin = max(0, begin - READ_BYTES)
            file.seek(begin)
            newline = file.read(READ_BYTES).rfind(b"\n")
        whole = begin + newline + 1
        file.truncate(whole)
    return size - whole


def sync_folder(folder: Path) -> None:
    """Syncs the names in the folder to the disk. Raises OSError."""
    descriptor = open_file(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(path: Path, key: str) -> None:
    """Raises ConfigError unless the file can be created or replaced; creates its folder."""
    if path.is_dir():
        raise ConfigError(f"{key} {path}: is a folder; give the name of a file")
    probe = path.with_name(f".{path.name}.{os.getpid()}.probe")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{key} {path}: cannot be written: {error.strerror}; give another place, or make its folder writable"
        ) from None


def read_json(path: Path, key: str = "", *, kind: type = dict) -> Any:
    """The object, or with `kind=list` the list, in a JSON file. Raises ConfigError that names the file and the config
    key that refers to it."""
    named = f"{key}: {path}" if key else f"{path}"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{named}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise ConfigError(f"{named}: not JSON: {error}; it may be half written or damaged, write it again") from None
    if not isinstance(value, kind):
        expected = {dict: "object", list: "array"}[kind]
        raise ConfigError(f"{named}: expected a JSON {expected}, found {type(value).__name__}")
    return value


def read_tensor_descriptions(path: Path) -> dict[str, Any]:
    """The dtype and shape of each tensor in a safetensors file, from its header. Raises ConfigError for any other file,
    before memory is allocated for the sizes that it claims."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(MAX_TENSOR_HEADER_BYTES, path.stat().st_size):
                raise ValueError(f"a header of {length} bytes in a file of {path.stat().st_size}")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise TypeError(f"its header is {type(header).__name__}")
        tensors = {str(name): value for name, value in header.items() if name != "__metadata__"}
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        if path.stat().st_size < end:
            raise ValueError(f"{path.stat().st_size} of {end} bytes")
    except (OSError, LookupError, ValueError, TypeError, RecursionError, struct.error) as error:
        raise ConfigError(
            f"{path}: not a complete safetensors file ({type(error).__name__}: {error}); save or download the model "
            "again"
        ) from None
    return tensors


def tensor_files(folder: Path) -> dict[str, Path]:
    """Returns the file of each tensor in a model's folder. Raises ConfigError unless the folder has safetensors files
    that transformers finds, and all of them are complete."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file() and single.is_file():
        raise ConfigError(f"{folder} has {SINGLE} and {INDEX}, which may be of two models; remove the older one")
    if not index.is_file():
        if not single.is_file():
            raise ConfigError(f"{folder} has neither {SINGLE} nor {INDEX}; save the model in the safetensors format")
        return dict.fromkeys(read_tensor_descriptions(single), single)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{index}: has no weight_map; save or download the model again")
    files: dict[str, Path] = {}
    for name in sorted(set(weight_map.values())):
        if not (path := folder / name).is_file():
            raise ConfigError(f"{path}: is missing, although {INDEX} names it; download the model again")
        for tensor in read_tensor_descriptions(path):
            files[tensor] = path
    if lost := sorted(weight_map.keys() - files.keys()):
        raise ConfigError(f"{folder / weight_map[lost[0]]}: has no {lost[0]}, although {INDEX} says so; save it again")
    return files


def is_weight_file(name: str) -> bool:
    """True if a file of a model's folder has weights, is an index of such files, or belongs to an adapter."""
    return name.endswith((*WEIGHT_SUFFIXES, ".index.json")) or name.startswith("adapter_")


def next_free_path(folder: Path, prefix: str) -> Path:
    """The first of `prefix`1, `prefix`2 and so on that is not in the folder."""
    return next(path for number in count(1) if not (path := folder / f"{prefix}{number}").exists())
