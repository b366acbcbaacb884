"""A folder of a local file system or of an object store: what is written there is complete or not there."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from asyncrl.errors import ConfigError
from asyncrl.util.files import sync_folder
from asyncrl.weights.files.manifest import MANIFEST, MAX_MANIFEST_BYTES, File

CHUNK_BYTES = 8 << 20
"""Size of the pieces in which files are read and written."""


class BadFileError(Exception):
    """A stored file is gone, cannot be read, or has other bytes than its manifest says; the text names it."""


class Folder:
    """A folder by its path or URL (`s3://bucket/runs`). Names in it are relative. `check` is called for each chunk that
    is read or written, and may raise."""

    def __init__(self, url: str, *, check: Callable[[], None] = lambda: None) -> None:
        self.url = url
        self.check = check
        try:
            self._store, self._path = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"weights.url = {url!r}: cannot be used: {error}; give a local path, or install the fsspec package of "
                "that store (s3fs, gcsfs, adlfs)"
            ) from None
        self._is_local = isinstance(self._store, LocalFileSystem)

    def at(self, name: str) -> str:
        """The place of a file, for messages."""
        return f"{self.url.rstrip('/')}/{name}"

    def write(self, name: str, chunks: Iterable[Any]) -> File:
        """Writes the file, which is complete or not there at any moment, and survives a power loss if the file system
        is local. Raises OSError."""
        digest, num_bytes = hashlib.sha256(), 0
        path = f"{self._path}/{name}"
        temporary = Path(path).with_name(f".{Path(path).name}.new")
        self._make_parent(name)
        with open(temporary, "wb") if self._is_local else self._store.open(path, "wb") as file:
            for chunk in chunks:
                self.check()
                digest.update(chunk)
                num_bytes += len(chunk)
                file.write(chunk)
            if self._is_local:
                file.flush()
                os.fsync(file.fileno())
        if self._is_local:
            os.replace(temporary, path)
            sync_folder(Path(path).parent)
        return File(Path(name).name, num_bytes, digest.hexdigest())

    def read(self, folder: str, file: File) -> bytearray:
        """The bytes of a file. Raises BadFileError unless they are those that were written."""
        data = bytearray(file.bytes)
        self.read_into(folder, file, [memoryview(data)])
        return data

    def read_into(self, folder: str, file: File, parts: Iterable[memoryview]) -> None:
        """Fills the parts, one after another, with the bytes of a file. Raises BadFileError unless they are those that
        were written, and fill the parts."""
        name, digest = f"{folder}/{file.name}", hashlib.sha256()
        try:
            with self._store.open(f"{self._path}/{name}", "rb") as stored:
                for part in parts:
                    self._fill(part, stored, name, digest)
                if stored.read(1):
                    raise BadFileError(f"{self.at(name)}: has more bytes than the {file.bytes} of its manifest")
        except OSError as error:
            raise BadFileError(f"{self.at(name)}: cannot be read: {error or type(error).__name__}") from None
        if (found := digest.hexdigest()) != file.sha256:
            raise BadFileError(f"{self.at(name)}: its sha256 is {found}, that of its manifest {file.sha256}")

    def read_small(self, name: str) -> bytes:
        """The bytes of a file that has at most MAX_MANIFEST_BYTES. Raises BadFileError."""
        try:
            with self._store.open(f"{self._path}/{name}", "rb") as stored:
                data: bytes = stored.read(MAX_MANIFEST_BYTES + 1)
        except OSError as error:
            raise BadFileError(f"{self.at(name)}: cannot be read: {error or type(error).__name__}") from None
        if len(data) > MAX_MANIFEST_BYTES:
            raise BadFileError(f"{self.at(name)}: has more than {MAX_MANIFEST_BYTES} bytes")
        return data

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if it is not there. Raises OSError."""
        try:
            return self._store.size(f"{self._path}/{name}")
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """Names of the files and folders in it. Raises OSError."""
        try:
            found: list[str] = self._store.ls(self._path, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def remove(self, name: str) -> None:
        """Removes a folder and the files in it, the manifest first: without one, it does not exist. Raises OSError."""
        path = f"{self._path}/{name}"
        if self._is_local:
            Path(path, MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)
            return
        if self._store.exists(f"{path}/{MANIFEST}"):
            self._store.rm_file(f"{path}/{MANIFEST}")
        if self._store.exists(path):
            self._store.rm(path, recursive=True)

    def _make_parent(self, name: str) -> None:
        parent = Path(self._path, name).parent
        if self._is_local and not parent.is_dir():
            parent.mkdir(parents=True, exist_ok=True)  # by several ranks at once
            sync_folder(parent.parent)

    def _fill(self, part: memoryview, stored: Any, name: str, digest: Any) -> None:
        filled = 0
        while filled < len(part):
            self.check()
            chunk = part[filled : filled + CHUNK_BYTES]
            count = stored.readinto(chunk)
            if not count:
                raise BadFileError(f"{self.at(name)}: ends too early")
            digest.update(chunk[:count])
            filled += count
