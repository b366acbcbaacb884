"""Versions of the weights in a folder or an object store: their files, what proves them, and how they are read.

    URL/v000120-1f0c9a02/   full-00000.safetensors ...  from-000119.delta  manifest.json
    URL/v000121-77ab03d1/   from-000120.delta  from-000120-1.delta  manifest.json

Each learner rank writes its slices (`layout.py`); `-1` stands for rank 1. A version has a folder, whose name no other
attempt has. Its manifest is written last: a folder without one does not exist. Whoever has the sha256 of a manifest can
prove everything: the manifest has the sums of its files and of the result, and the sha256 of earlier manifests. A
manifest is signed with a key that only the processes of its run have. So neither the store nor whoever passes an
announcement on is trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import fsspec
import msgspec
import numpy as np
import structlog
import torch
import xxhash
from fsspec.implementations.local import LocalFileSystem
from msgspec import Meta
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, ProtocolError
from asyncrl.types import Count, Number
from asyncrl.util.files import sync_folder
from asyncrl.weights import deltas
from asyncrl.weights.layout import Entry, RankSlices, WeightManifest, slices_of
from asyncrl.wire.messages import MAX_INDEX, Announced, FolderName, Index, Sha256

log = structlog.get_logger()

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
SUM_BYTES = 64 << 20
"""Size of the parts of a rank's slices that have a sum each."""
CHUNK_BYTES = 8 << 20
"""Size of the pieces in which files are read and written."""
_TRIES = 2
"""Attempts at a step before other paths are tried."""
_KEY_LABEL = b"asyncrl manifests of weights"
_FileName = Annotated[
    str, Meta(pattern=r"\A(full-[0-9]{1,10}(-[0-9]{1,5})?\.safetensors|from-[0-9]{1,10}(-[0-9]{1,5})?\.delta)\Z")
]
_Xxh3 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]


# --- files


class BadFileError(Exception):
    """A stored file is missing, unreadable, or differs from its manifest; the text names it."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A struct of the store."""


class StoredFile(Part, frozen=True):
    """A file of a version, with a rank's slices (`layout.py`) of the tensors from `first` to before `last`: their
    bytes, or the changes in them."""

    name: _FileName
    bytes: Number
    sha256: Sha256
    rank: Index
    first: Count
    last: Count


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

    def write(self, name: str, chunks: Iterable[Any]) -> tuple[int, str]:
        """Writes the file, which is complete or missing at any moment, and survives a power loss if the file system
        is local. Returns its size and sha256. Raises OSError."""
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
        return num_bytes, digest.hexdigest()

    def read_into(self, folder: str, file: StoredFile, parts: Iterable[memoryview]) -> None:
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
        if (actual := digest.hexdigest()) != file.sha256:
            raise BadFileError(f"{self.at(name)}: its sha256 is {actual}, that of its manifest {file.sha256}")

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


_SAFETENSORS_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


def header(entries: tuple[Entry, ...]) -> bytes:
    """The head of a safetensors file with these tensors in this order."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.num_bytes
        dtype = _SAFETENSORS_NAMES[entry.dtype]
        described[entry.name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def views_of(spans: Iterable[tuple[int, int]], buffer: NDArray[np.uint8]) -> list[memoryview]:
    """The bytes of these spans, each a first byte and a size, in the buffer."""
    return [buffer.data[start : start + num_bytes] for start, num_bytes in spans]


def sums_of(buffer: NDArray[np.uint8], spans: Iterable[tuple[int, int]], check: Callable[[], None]) -> list[str]:
    """Returns the sum of each SUM_BYTES of spans of a buffer, one after another; a span is its first byte and its size.
    `check` is called for each part and may raise."""
    sums: list[str] = []
    digest, room = xxhash.xxh3_128(), SUM_BYTES
    for start, left in spans:
        while left:
            check()
            size = min(left, room)
            digest.update(buffer[start : start + size].data)
            start, left, room = start + size, left - size, room - size
            if not room:
                sums.append(digest.hexdigest())
                digest, room = xxhash.xxh3_128(), SUM_BYTES
    return sums if room == SUM_BYTES else [*sums, digest.hexdigest()]


def digest_of(sums: Sequence[str]) -> str:
    """The digest of weights that have these sums."""
    return hashlib.sha256("".join(sums).encode()).hexdigest()


# --- manifests


class Stamp(Part, frozen=True):
    """A version and the digest of its bytes: two attempts at a version may differ."""

    version: Count
    digest: Sha256


class UpdatePath(Part, frozen=True):
    """Files that turn the weights of `base` into a version's, or make them from nothing."""

    base: Stamp | None
    files: list[StoredFile]


class Edge(Part, frozen=True):
    """The size of an update path of an earlier version."""

    base: Stamp | None
    bytes: Number


class Earlier(Part, frozen=True):
    """An earlier version that is still in the store."""

    folder: FolderName
    sha256: Sha256
    """Hash of its manifest."""
    stamp: Stamp
    edges: list[Edge]

    @property
    def is_full(self) -> bool:
        """True if it can be made from nothing."""
        return any(edge.base is None for edge in self.edges)


class Manifest(Part, frozen=True):
    """The manifest of a version."""

    stamp: Stamp
    epoch: Count
    """Number of earlier starts of the learner ranks that wrote it, in the launch whose key signs it."""
    layout: str
    """Names, shapes and dtypes (`WeightManifest.to_json`)."""
    ranks: Annotated[int, Meta(ge=1, le=MAX_INDEX + 1)]
    """Learner ranks, each of which has written its slices."""
    sums: list[_Xxh3]
    """The sums of each SUM_BYTES of rank 0's slices, one after another, then of those of rank 1, and so on."""
    paths: list[UpdatePath]
    earlier: list[Earlier]
    """The oldest one first."""

    def __post_init__(self) -> None:
        if any(file.rank >= self.ranks for path in self.paths for file in path.files):
            raise ValueError(f"a file of a rank that is not one of {self.ranks}")

    def signed(self, key: bytes) -> bytes:
        """The manifest as JSON, with its signature."""
        text = msgspec.json.encode(self)
        return msgspec.json.encode(Signed(_hmac(key, text), msgspec.Raw(text)))

    def listed(self, folder: str, sha256: str) -> Earlier:
        """The version as later manifests list it."""
        edges = [Edge(path.base, sum(file.bytes for file in path.files)) for path in self.paths]
        return Earlier(folder, sha256, self.stamp, edges)


class Signed(Part, frozen=True):
    """A manifest as it is stored."""

    hmac: Sha256
    """HMAC-SHA256 of its text."""
    manifest: msgspec.Raw


def _hmac(key: bytes, text: bytes | msgspec.Raw) -> str:
    return hmac.new(key, memoryview(text), "sha256").hexdigest()


def manifest_key(run_id: str) -> bytes:
    """The key that signs the manifests of a run, from the id that only its processes know: HKDF-SHA256 (RFC 5869)
    without salt."""
    return hmac.digest(hmac.digest(bytes(32), run_id.encode(), "sha256"), _KEY_LABEL + b"\x01", "sha256")


def read_manifest(folder: Folder, name: str, sha256: str, key: bytes) -> Manifest:
    """The manifest that has this sum and is signed with this key. Raises BadFileError."""
    data = folder.read_small(name)
    if (actual := hashlib.sha256(data).hexdigest()) != sha256:
        raise BadFileError(f"{folder.at(name)}: its sha256 is {actual}, announced was {sha256}")
    try:
        signed = msgspec.json.decode(data, type=Signed)
        if not hmac.compare_digest(signed.hmac, _hmac(key, signed.manifest)):
            raise BadFileError(
                f"{folder.at(name)}: was not written by this run: its HMAC-SHA256 is not of the run's key"
            )
        return msgspec.json.decode(signed.manifest, type=Manifest)
    except msgspec.DecodeError as error:
        raise BadFileError(f"{folder.at(name)}: cannot be read: {error}") from None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a reader: a version to make, and from which one."""

    folder: str
    sha256: str
    """Hash of the manifest."""
    base: Stamp | None


def cheapest_path(versions: Iterable[Earlier], held: Stamp | None, without: Container[Step] = ()) -> list[Step] | None:
    """Returns the steps with the fewest bytes that lead from what a reader holds, or from nothing, to the last of the
    versions, which are in the order of their publication; None if there are none. Steps in `without` are not taken."""
    best: dict[Stamp, tuple[int, list[Step]]] = {held: (0, [])} if held is not None else {}
    target = None
    for version in versions:
        target = version.stamp
        for edge in version.edges:
            step = Step(version.folder, version.sha256, edge.base)
            so_far = (0, []) if edge.base is None else best.get(edge.base)
            if so_far is None or step in without:
                continue
            num_bytes = so_far[0] + edge.bytes
            if target not in best or num_bytes < best[target][0]:
                best[target] = num_bytes, [*so_far[1], step]
    return best[target][1] if target in best else None


# --- reading


class Reader:
    """Turns the weights in a buffer, bytes in the order of the layout, into announced versions along the cheapest path,
    and verifies everything before it counts."""

    def __init__(self, folder: Folder, layout: WeightManifest, weights: NDArray[np.uint8], *, key: bytes) -> None:
        self.layout = layout
        self.held: Stamp | None = None
        """The version in the buffer, if that is known."""
        self.num_bytes = 0
        """Bytes read from files of weights."""
        self._folder = folder
        self._last: tuple[str, Manifest] | None = None
        """The last manifest that was read, and its sha256."""
        self._layout_json = layout.to_json()
        self._key = key
        self._epoch = 0
        """The latest start of the learner ranks of which it has read a manifest."""
        self._weights = weights
        self._slices: list[RankSlices] = []
        """The slices of the ranks that have written the version in the buffer."""

    def available(self, announced: Announced) -> list[Earlier]:
        """The versions that are still in the store, the oldest first, up to an announced one. Raises BadFileError."""
        manifest = self._manifest_of(announced)
        return [*manifest.earlier, manifest.listed(announced.folder, announced.sha256)]

    def fetch(self, announced: Announced, await_free: Callable[[], None]) -> None:
        """Makes the buffer hold the version; `await_free` returns when it may be written. A step that fails is made
        again, then the best path without it is taken. Raises BadFileError when there is none, naming the files; the
        buffer may hold another version then, or none."""
        problems: list[str] = []
        failures: Counter[Step] = Counter()
        target, versions = self._manifest_of(announced), self.available(announced)
        if self.held is not None and digest_of(self._sums()) != self.held.digest:
            log.error("the weights in memory have changed", version=self.held.version)
            self.held = None
        while self.held != target.stamp:
            bad = {step for step, count in failures.items() if count >= _TRIES}
            steps = cheapest_path(versions, self.held, bad)
            if not steps:
                reason = "; ".join(dict.fromkeys(problems)) or f"{self._folder.url}: no path to {announced.folder}"
                raise BadFileError(reason)
            step = steps[0]
            try:
                is_target = step.folder == announced.folder
                self._take(step, target if is_target else self._manifest(step.folder, step.sha256), await_free)
            except (BadFileError, ProtocolError) as error:
                failures[step] += 1
                problems.append(str(error))
                log.warning("weights cannot be read from the store", version=announced.version, reason=str(error))

    def _manifest_of(self, announced: Announced) -> Manifest:
        """The manifest of an announced version, read twice if the first attempt fails. Raises BadFileError for one of
        learner ranks that have been replaced, whose process is still alive."""
        try:
            manifest = self._manifest(announced.folder, announced.sha256)
        except BadFileError:
            manifest = self._manifest(announced.folder, announced.sha256)
        place = self._folder.at(announced.folder)
        if manifest.stamp.version != announced.version:
            raise BadFileError(f"{place}: has version {manifest.stamp.version}, announced was {announced.version}")
        if manifest.epoch < self._epoch:
            raise BadFileError(
                f"{place}: was written by start {manifest.epoch} of the learner ranks, which start {self._epoch} has "
                "superseded"
            )
        self._epoch = manifest.epoch
        return manifest

    def _manifest(self, folder: str, sha256: str) -> Manifest:
        if self._last is None or self._last[0] != sha256:
            name = f"{folder}/{MANIFEST}"
            manifest = read_manifest(self._folder, name, sha256, self._key)
            if manifest.layout != self._layout_json:
                raise BadFileError(
                    f"{self._folder.at(name)}: has weights of other names, shapes or dtypes than the model"
                )
            self._last = sha256, manifest
        return self._last[1]

    def _take(self, step: Step, manifest: Manifest, await_free: Callable[[], None]) -> None:
        path = next(path for path in manifest.paths if path.base == step.base)
        if step.base is None:
            await_free()
            self.held = None
            self._slices = [slices_of(self.layout, rank, manifest.ranks) for rank in range(manifest.ranks)]
            for file in path.files:
                self._read_full(step.folder, file)
        else:
            changes = [(file.rank, self._read_delta(step.folder, file)) for file in path.files]
            await_free()
            self.held = None
            for rank, delta in changes:
                places = deltas.Scattered(self._slices[rank])
                deltas.apply(delta, self._weights.view(np.uint16), places, check=self._folder.check)
        self.num_bytes += sum(file.bytes for file in path.files)
        actual = self._sums()
        if actual != manifest.sums:
            pairs = enumerate(zip(actual, manifest.sums, strict=False))
            part = next((number for number, (one, other) in pairs if one != other), 0)
            raise BadFileError(
                f"{self._folder.at(step.folder)}: the weights that {', '.join(file.name for file in path.files)} make "
                f"differ from version {manifest.stamp.version} in part {part}: their sum is {actual[part]}, that of "
                f"the manifest {manifest.sums[part] if part < len(manifest.sums) else 'missing'}"
            )
        self.held = manifest.stamp

    def _read_full(self, folder: str, file: StoredFile) -> None:
        slices, range_ = self._slices[file.rank], slice(file.first, file.last)
        expected = header(slices.layout.entries[range_])
        head = bytearray(len(expected))
        self._folder.read_into(folder, file, [memoryview(head), *views_of(slices.spans[range_], self._weights)])
        if head != expected:
            raise BadFileError(f"{self._folder.at(f'{folder}/{file.name}')}: has other tensors than the model")

    def _read_delta(self, folder: str, file: StoredFile) -> memoryview:
        delta = memoryview(bytearray(file.bytes))
        self._folder.read_into(folder, file, [delta])
        return delta

    def _sums(self) -> list[str]:
        return [part for rank in self._slices for part in sums_of(self._weights, rank.spans, self._folder.check)]
