"""Versions of the weights in a folder or an object store: their files, what proves them, and how they are read.

    URL/v000120-1f0c9a02/   full-0.bin  full-1.bin  manifest.json
    URL/v000121-77ab03d1/   delta-0.bin  delta-1.bin  manifest.json

Each learner rank writes a file with its slices (`layout.py`): all of their bytes, or the changes since the version
before (`deltas.py`). A version has a folder, whose name no other attempt has. Its manifest is written last: a folder
without one does not exist. It has the sha256 of the files and the sums of the result, and is signed with a key that
only the processes of its run have. So neither the store nor whoever passes an announcement on is trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import fsspec
import msgspec
import numpy as np
import xxhash
from fsspec.implementations.local import LocalFileSystem
from msgspec import Meta
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, ProtocolError
from asyncrl.types import Count, Number
from asyncrl.util.files import sync_folder
from asyncrl.weights import deltas
from asyncrl.weights.layout import RankSlices, WeightManifest, slices_of
from asyncrl.wire.messages import Announced, FolderName

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
CHUNK_BYTES = 8 << 20
"""Size of the pieces in which files are read and written."""
_KEY_LABEL = b"asyncrl manifests of weights"
_Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Xxh3 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]


# --- files


class BadFileError(Exception):
    """A stored file is missing, unreadable, or differs from its manifest; the text names it."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A struct of the store."""


class StoredFile(Part, frozen=True):
    """A file of a version, with a rank's slices or the changes in them."""

    bytes: Number
    sha256: _Sha256


def file_name(rank: int, *, is_delta: bool) -> str:
    """The name of a rank's file in the folder of a version."""
    return f"{'delta' if is_delta else 'full'}-{rank}.bin"


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
        """The full path of a file, for messages."""
        return f"{self.url.rstrip('/')}/{name}"

    def write(self, name: str, chunks: Iterable[Any]) -> StoredFile:
        """Writes the file, which is complete or missing at any moment, and survives a power loss if the file system
        is local. Raises OSError."""
        digest, num_bytes = hashlib.sha256(), 0
        path = f"{self._path}/{name}"
        temporary = Path(path).with_name(f".{Path(path).name}.new")
        parent = Path(path).parent
        if self._is_local and not parent.is_dir():
            parent.mkdir(parents=True, exist_ok=True)  # by several ranks at once
            sync_folder(parent.parent)
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
            sync_folder(parent)
        return StoredFile(num_bytes, digest.hexdigest())

    def read_into(self, name: str, file: StoredFile, parts: Iterable[memoryview]) -> None:
        """Fills the parts, one after another, with the bytes of a file. Raises BadFileError unless they are those that
        were written, and fill the parts."""
        digest = hashlib.sha256()
        try:
            with self._store.open(f"{self._path}/{name}", "rb") as stored:
                for part in parts:
                    filled = 0
                    while filled < len(part):
                        self.check()
                        if not (count := stored.readinto(part[filled : filled + CHUNK_BYTES])):
                            raise BadFileError(f"{self.at(name)}: ends too early")
                        digest.update(part[filled : filled + count])
                        filled += count
                if stored.read(1):
                    raise BadFileError(f"{self.at(name)}: has more bytes than the {file.bytes} of its manifest")
        except OSError as error:
            raise self._unreadable(name, error) from None
        if (actual := digest.hexdigest()) != file.sha256:
            raise BadFileError(f"{self.at(name)}: its sha256 is {actual}, that of its manifest {file.sha256}")

    def read_small(self, name: str) -> bytes:
        """The bytes of a file that has at most MAX_MANIFEST_BYTES. Raises BadFileError."""
        try:
            with self._store.open(f"{self._path}/{name}", "rb") as stored:
                data: bytes = stored.read(MAX_MANIFEST_BYTES + 1)
        except OSError as error:
            raise self._unreadable(name, error) from None
        if len(data) > MAX_MANIFEST_BYTES:
            raise BadFileError(f"{self.at(name)}: has more than {MAX_MANIFEST_BYTES} bytes")
        return data

    def _unreadable(self, name: str, error: Exception) -> BadFileError:
        return BadFileError(f"{self.at(name)}: cannot be read: {str(error) or type(error).__name__}")

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if it is missing. Raises OSError."""
        try:
            return self._store.size(f"{self._path}/{name}")
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """Names of the files and folders in it. Raises OSError."""
        try:
            paths: list[str] = self._store.ls(self._path, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

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


def chunks_of(buffer: NDArray[np.uint8], spans: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
    """Yields the bytes of these spans, each a first byte and a size, in pieces of at most CHUNK_BYTES."""
    for start, num_bytes in spans:
        for at in range(start, start + num_bytes, CHUNK_BYTES):
            yield buffer.data[at : min(at + CHUNK_BYTES, start + num_bytes)]


def sum_of(buffer: NDArray[np.uint8], spans: Iterable[tuple[int, int]], check: Callable[[], None]) -> str:
    """The sum of spans of a buffer, one after another. `check` is called for each chunk and may raise."""
    digest = xxhash.xxh3_128()
    for chunk in chunks_of(buffer, spans):
        check()
        digest.update(chunk)
    return digest.hexdigest()


# --- manifests


class StoredVersion(Part, frozen=True):
    """A version in the store."""

    version: Count
    folder: FolderName
    base: FolderName | None
    """The version from which it has a delta."""
    is_full: bool
    """True if it can be made from nothing."""


class Manifest(Part, frozen=True):
    """The manifest of a version."""

    stored: StoredVersion
    epoch: Count
    """Number of earlier starts of the learner ranks that wrote it, in the launch whose key signs it."""
    layout: str
    """Names, shapes and dtypes (`WeightManifest.to_json`)."""
    sums: list[_Xxh3]
    """The sum of the slices of each rank."""
    deltas: list[StoredFile]
    """One of each rank; empty without a base."""
    full: list[StoredFile]
    """One of each rank; empty unless the version is full."""
    earlier: list[StoredVersion]
    """The other versions in the store, the oldest one first."""

    def __post_init__(self) -> None:
        counts = self.stored.base is not None, self.stored.is_full
        if not any(counts) or [len(self.deltas), len(self.full)] != [len(self.sums) * count for count in counts]:
            raise ValueError(f"files of other ranks than {len(self.sums)}")

    def signed(self, key: bytes) -> bytes:
        """The manifest as JSON, with its signature."""
        text = msgspec.json.encode(self)
        return msgspec.json.encode(Signed(_hmac(key, text), msgspec.Raw(text)))


class Signed(Part, frozen=True):
    """A manifest as it is stored."""

    hmac: _Sha256
    """HMAC-SHA256 of its text."""
    manifest: msgspec.Raw


def _hmac(key: bytes, text: bytes | msgspec.Raw) -> str:
    return hmac.new(key, memoryview(text), "sha256").hexdigest()


def manifest_key(run_id: str) -> bytes:
    """The key that signs the manifests of a run, from the id that only its processes know."""
    return hmac.digest(run_id.encode(), _KEY_LABEL, "sha256")


def read_manifest(folder: Folder, version_folder: str, key: bytes) -> Manifest:
    """The manifest of the version in this folder, which is signed with this key. Raises BadFileError."""
    name = f"{version_folder}/{MANIFEST}"
    data = folder.read_small(name)
    try:
        signed = msgspec.json.decode(data, type=Signed)
        if not hmac.compare_digest(_hmac(key, signed.manifest), signed.hmac):
            raise BadFileError(
                f"{folder.at(name)}: was not written by this run: its HMAC-SHA256 is not of the run's key"
            )
        manifest = msgspec.json.decode(signed.manifest, type=Manifest)
    except msgspec.DecodeError as error:
        raise BadFileError(f"{folder.at(name)}: cannot be read: {error}") from None
    if manifest.stored.folder != version_folder:
        raise BadFileError(f"{folder.at(name)}: belongs to {manifest.stored.folder}")
    return manifest


def steps_to(versions: Sequence[StoredVersion], held: str | None) -> list[StoredVersion]:
    """Returns the versions to be read, in order, to have the last of `versions`, which are in the order of their
    publication: deltas in a row from the one in the folder `held`, or the last full version and the deltas after it.
    Empty if neither is there."""
    steps: list[StoredVersion] = []
    for version in reversed(versions):
        steps.insert(0, version)
        if version.is_full or (version.base is not None and version.base == held):
            return steps
    return []


# --- reading


class Reader:
    """Turns the weights in a buffer, bytes in the order of the layout, into announced versions, and verifies everything
    before it counts."""

    def __init__(self, folder: Folder, layout: WeightManifest, weights: NDArray[np.uint8], *, key: bytes) -> None:
        self.layout = layout
        self.held: str | None = None
        """Folder of the version in the buffer, if that is known."""
        self.num_bytes = 0
        """Bytes read from files of weights."""
        self._folder = folder
        self._layout_json = layout.to_json()
        self._key = key
        self._epoch = 0
        """The latest start of the learner ranks of which it has read a manifest."""
        self._weights = weights
        self._slices: list[RankSlices] = []
        """The slices of the ranks that have written the version in the buffer."""
        self._sums: list[str] = []
        """Their sums."""

    def available(self, announced: Announced) -> list[StoredVersion]:
        """The versions that are still in the store, the oldest first, up to an announced one. Raises BadFileError as
        `fetch` does."""
        manifest = self._announced(announced)
        return [*manifest.earlier, manifest.stored]

    def _announced(self, announced: Announced) -> Manifest:
        """The manifest of an announced version. Raises BadFileError, also for a version of learner ranks that have been
        replaced, whose process is still alive."""
        manifest, place = self._manifest(announced.folder), self._folder.at(announced.folder)
        if manifest.stored.version != announced.version:
            raise BadFileError(f"{place}: has version {manifest.stored.version}, announced was {announced.version}")
        if manifest.epoch < self._epoch:
            raise BadFileError(
                f"{place}: was written by start {manifest.epoch} of the learner ranks, which start {self._epoch} has "
                "superseded"
            )
        self._epoch = manifest.epoch
        return manifest

    def fetch(self, announced: Announced, await_free: Callable[[], None]) -> None:
        """Makes the buffer hold the version; `await_free` returns when it may be written. A version with the bits that
        are there is not read. Raises BadFileError, naming the file; the buffer may hold another version then, or none.
        """
        manifest = self._announced(announced)
        if self.held is not None and manifest.sums == self._sums:
            self.held = announced.folder
            return
        steps = steps_to([*manifest.earlier, manifest.stored], self.held)
        if not steps:
            raise BadFileError(f"{self._folder.url}: no full version from which to make {announced.folder}")
        for step in steps:
            self._take(step, await_free)

    def _manifest(self, folder: str) -> Manifest:
        manifest = read_manifest(self._folder, folder, self._key)
        if manifest.layout != self._layout_json:
            raise BadFileError(f"{self._folder.at(folder)}: has other names, shapes or dtypes than the model")
        return manifest

    def _take(self, step: StoredVersion, await_free: Callable[[], None]) -> None:
        manifest = self._manifest(step.folder)
        is_delta = step.base is not None and step.base == self.held
        files = manifest.deltas if is_delta else manifest.full
        names = [f"{step.folder}/{file_name(rank, is_delta=is_delta)}" for rank in range(len(files))]
        changes = [memoryview(bytearray(file.bytes)) for file in files] if is_delta else []
        for name, file, change in zip(names, files, changes, strict=False):
            self._folder.read_into(name, file, [change])
        await_free()
        self.held = None
        if not is_delta:
            self._slices = [slices_of(self.layout, rank, len(files)) for rank in range(len(files))]
        for rank, (name, file, slices) in enumerate(zip(names, files, self._slices, strict=True)):
            try:
                if is_delta:
                    words = self._weights.view(np.uint16)
                    deltas.apply(changes[rank], words, slices, check=self._folder.check)
                else:
                    self._folder.read_into(name, file, chunks_of(self._weights, slices.spans))
            except ProtocolError as error:
                raise BadFileError(f"{self._folder.at(name)}: {error}") from None
            actual, expected = sum_of(self._weights, slices.spans, self._folder.check), manifest.sums[rank]
            if actual != expected:
                raise BadFileError(
                    f"{self._folder.at(name)}: makes other weights than version {step.version} has: their sum is "
                    f"{actual}, that of the manifest {expected}"
                )
        self.num_bytes += sum(file.bytes for file in files)
        self.held, self._sums = step.folder, manifest.sums
