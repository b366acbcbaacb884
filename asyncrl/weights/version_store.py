"""A folder of a local file system or of an object store: what is written there is complete or not there."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
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
from asyncrl.util.files import sync_folder
from asyncrl.weights import deltas
from asyncrl.weights.deltas import Scattered
from asyncrl.weights.layout import Entry, RankSlices, WeightManifest, slices_of
from asyncrl.wire.messages import MAX_INDEX, Announced, Count, FolderName, Index, Link, Number, Sha256

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


MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
SUM_BYTES = 64 << 20
"""Size of the parts of a rank's slices that have a sum each."""

_KEY_LABEL = b"asyncrl manifests of weights"

_FileName = Annotated[
    str, Meta(pattern=r"\A(full-[0-9]{1,10}(-[0-9]{1,5})?\.safetensors|from-[0-9]{1,10}(-[0-9]{1,5})?\.delta)\Z")
]
_Xxh3 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A struct of the store."""


class File(Part, frozen=True):
    """A file and its sum."""

    name: str
    bytes: int
    sha256: str


class StoredFile(Part, frozen=True):
    """A file of a version, with a rank's slices (`weights/layout.py`) of the tensors from `first` to before `last` of
    the layout: their bytes, or what has changed in them."""

    name: _FileName
    bytes: Number
    sha256: Sha256
    rank: Index
    first: Count
    last: Count

    @property
    def file(self) -> File:
        """Its name and sum."""
        return File(self.name, self.bytes, self.sha256)


class Stamp(Part, frozen=True):
    """A version and the digest of its bytes: two attempts at a version may differ."""

    version: Count
    digest: Sha256


class Way(Part, frozen=True):
    """Files that turn the weights of `base` into those of a version, or make them from nothing."""

    base: Stamp | None
    files: list[StoredFile]


class Edge(Part, frozen=True):
    """A way of an earlier version, without its files."""

    base: Stamp | None
    bytes: Number


class Earlier(Part, frozen=True):
    """An earlier version that is still there."""

    folder: FolderName
    sha256: Sha256
    """Of its manifest."""
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
    ways: list[Way]
    earlier: list[Earlier]
    """The oldest one first."""

    def __post_init__(self) -> None:
        if any(file.rank >= self.ranks for way in self.ways for file in way.files):
            raise ValueError(f"a file of a rank that is none of {self.ranks}")

    def signed(self, key: bytes) -> bytes:
        """The manifest as JSON, with its signature."""
        text = msgspec.json.encode(self)
        return msgspec.json.encode(Signed(_hmac(key, text), msgspec.Raw(text)))


class Signed(Part, frozen=True):
    """A manifest as it is stored."""

    hmac: Sha256
    """HMAC-SHA256 of its text."""
    manifest: msgspec.Raw

    def is_of(self, key: bytes) -> bool:
        """True if it was signed with this key."""
        return hmac.compare_digest(self.hmac, _hmac(key, self.manifest))


def manifest_key(run_id: str) -> bytes:
    """The key that signs the manifests of a run, from the id that only its processes know: HKDF-SHA256 (RFC 5869)
    without salt."""
    return hmac.digest(hmac.digest(bytes(32), run_id.encode(), "sha256"), _KEY_LABEL + b"\x01", "sha256")


def _hmac(key: bytes, text: bytes | msgspec.Raw) -> str:
    return hmac.new(key, memoryview(text), "sha256").hexdigest()


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


def edges_of(ways: Iterable[Way]) -> list[Edge]:
    """The ways without their files."""
    return [Edge(way.base, sum(file.bytes for file in way.files)) for way in ways]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a reader: a version to make, and from which one."""

    folder: str
    sha256: str
    """Of the manifest."""
    base: Stamp | None


def shortest_way(versions: Iterable[Earlier], held: Stamp | None, without: Container[Step] = ()) -> list[Step] | None:
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


_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
"""The dtypes of a layout, as safetensors files name them."""


def shards(entries: Sequence[Entry], shard_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the first and behind the last tensor of each file; a file has at most `shard_bytes`, or one tensor."""
    first = num_bytes = 0
    for index, entry in enumerate(entries):
        if index > first and num_bytes + entry.num_bytes > shard_bytes:
            yield first, index
            first, num_bytes = index, 0
        num_bytes += entry.num_bytes
    if entries:
        yield first, len(entries)


def header(entries: tuple[Entry, ...]) -> bytes:
    """The head of a safetensors file with these tensors in this order."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.num_bytes
        described[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def places(spans: Iterable[tuple[int, int]], buffer: NDArray[np.uint8]) -> list[memoryview]:
    """The bytes of these spans, each a first byte and a size, in the buffer."""
    whole = buffer.data
    return [whole[start : start + num_bytes] for start, num_bytes in spans]


STRIDES = ((1, 1.0), (4, 2.6), (16, 6.1), (64, 13.0))
"""Steps that one delta covers, and its bytes in those of a single step: changes overlap. Measured on 100 M weights."""
SLOWEST_STEPS = STRIDES[-1][0] / STRIDES[-1][1]
"""Steps that a single delta may take at most."""
_WINDOW = 8
"""The latest fetches and steps that are averaged."""


def stride_of(steps: float) -> int | None:
    """The smallest stride with which a reader follows that needs this many steps for a single delta; None if none
    suffices."""
    return next((stride for stride, cost in STRIDES if cost * steps <= stride), None)


class LinkMeter:
    """Measures a link from what is fetched, and steps from what is announced."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._announced: deque[tuple[int, float]] = deque(maxlen=_WINDOW + 1)
        """Versions, and when they were heard of."""
        self._fetches: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        """Bytes and seconds."""

    def announced(self, version: int) -> None:
        """Notes the newest version. One that is not newer than the last one begins again: the learner was restarted."""
        if self._announced and version <= self._announced[-1][0]:
            self._announced.clear()
        self._announced.append((version, self._clock_s()))

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """Notes what was read from the store, and the time that it took."""
        if num_bytes:
            self._fetches.append((num_bytes, seconds))

    def link(self, version_bytes: int, *, full: bool) -> Link | None:
        """The link, for versions that have this many bytes for a reader of the one before; `full` if they have no
        deltas. None until something was fetched, and a step measured."""
        steps = list(self._announced)
        if len(steps) < 2 or not self._fetches:
            return None
        (first, began_s), (last, ended_s) = steps[0], steps[-1]
        num_bytes, seconds = (sum(column) for column in zip(*self._fetches, strict=True))
        version_s = version_bytes * seconds / num_bytes
        step_s = (ended_s - began_s) / (last - first)
        bytes_per_s = num_bytes / max(seconds, 1e-9)
        stride = 1 if full else stride_of(version_s / max(step_s, 1e-9)) or STRIDES[-1][0]
        return Link(version_s=version_s, step_s=step_s, bytes_per_s=bytes_per_s, full=full, stride=stride)


log = structlog.get_logger()

_TRIES = 2
"""Times that a way is tried before others are."""


class Reader:
    """Turns the weights in a buffer, bytes in the order of the layout, into announced versions."""

    def __init__(self, folder: Folder, layout: WeightManifest, weights: NDArray[np.uint8], *, key: bytes) -> None:
        self.layout = layout
        self.held: Stamp | None = None
        """What is in the buffer, if that is known."""
        self.num_bytes = 0
        """Bytes read from files of weights."""
        self.seconds = 0.0
        """Time that it took to read them."""
        self.folder = folder
        self._last: tuple[str, Manifest] | None = None
        """The last manifest that was read, and its sha256."""
        self._layout_json = layout.to_json()
        self._key = key
        self._epoch = 0
        """The latest start of the learner ranks of which it has read a manifest."""
        self._weights = weights
        self._slices: list[RankSlices] = []
        """The slices of the ranks that have written what is in the buffer."""

    def earlier(self, announced: Announced) -> list[Announced]:
        """The versions before an announced one that are still there, the oldest first, and itself. Raises
        BadFileError."""
        return [Announced(one.stamp.version, one.folder, one.sha256) for one in self._versions(announced)]

    def version_bytes(self, announced: Announced) -> tuple[int, bool]:
        """The median bytes of a version for a reader of the one before, over those that are still there, and whether
        they are full ones. Raises BadFileError."""
        versions = self._versions(announced)
        edges = [(one.stamp.version, edge) for one in versions for edge in one.edges]
        deltas = [edge.bytes for version, edge in edges if edge.base is not None and edge.base.version == version - 1]
        return int(median(deltas or [edge.bytes for _, edge in edges])), not deltas

    def fetch(self, announced: Announced, await_free: Callable[[], None]) -> Stamp:
        """Makes the buffer hold the version; `await_free` returns when it may be written. A step that fails is made
        once more, then the best way without it is taken. Raises BadFileError when there is none, naming the files; the
        buffer may hold another version then, or none."""
        problems: list[str] = []
        failures: Counter[Step] = Counter()
        target = self._manifest_of(announced)
        *earlier, own = self._versions(announced)
        self._prove_held()
        while self.held != target.stamp:
            bad = {step for step, count in failures.items() if count >= _TRIES}
            steps = shortest_way([*earlier, own], self.held, bad)
            if not steps:
                raise BadFileError("; ".join(dict.fromkeys(problems)) or f"{self.folder.url}: no way to {own.folder}")
            step = steps[0]
            try:
                manifest = target if step.folder == own.folder else self._manifest(step.folder, step.sha256)
                self._take(step.folder, manifest, step.base, await_free)
            except (BadFileError, ProtocolError) as error:
                failures[step] += 1
                problems.append(str(error))
                log.warning("weights cannot be read from the store", version=announced.version, reason=str(error))
        return target.stamp

    def _versions(self, announced: Announced) -> list[Earlier]:
        """The versions that are still there, up to the announced one."""
        target = self._manifest_of(announced)
        own = Earlier(announced.folder, announced.sha256, target.stamp, edges_of(target.ways))
        return [*target.earlier, own]

    def _manifest_of(self, announced: Announced) -> Manifest:
        """The manifest of an announced version; a second look if the first one fails. Raises BadFileError for one of
        learner ranks that have been replaced, whose process is still alive."""
        try:
            manifest = self._manifest(announced.folder, announced.sha256)
        except BadFileError:
            manifest = self._manifest(announced.folder, announced.sha256)
        if manifest.stamp.version != announced.version:
            raise BadFileError(
                f"{self.folder.at(announced.folder)}: has version {manifest.stamp.version}, announced was "
                f"{announced.version}"
            )
        if manifest.epoch < self._epoch:
            raise BadFileError(
                f"{self.folder.at(announced.folder)}: was written by start {manifest.epoch} of the learner ranks, "
                f"which start {self._epoch} has superseded"
            )
        self._epoch = manifest.epoch
        return manifest

    def _manifest(self, folder: str, sha256: str) -> Manifest:
        if self._last is not None and self._last[0] == sha256:
            return self._last[1]
        name = f"{folder}/{MANIFEST}"
        manifest = read_manifest(self.folder, name, sha256, self._key)
        if manifest.layout != self._layout_json:
            raise BadFileError(f"{self.folder.at(name)}: has weights of other names, shapes or dtypes than the model")
        self._last = sha256, manifest
        return manifest

    def _take(self, folder: str, manifest: Manifest, base: Stamp | None, await_free: Callable[[], None]) -> None:
        way = next(way for way in manifest.ways if way.base == base)
        if base is None:
            self._take_full(folder, way, manifest.ranks, await_free)
        else:
            self._take_delta(folder, way, await_free)
        found = self._sums()
        if found != manifest.sums:
            part = next((i for i, pair in enumerate(zip(found, manifest.sums, strict=False)) if pair[0] != pair[1]), 0)
            names = ", ".join(file.name for file in way.files)
            raise BadFileError(
                f"{self.folder.at(folder)}: the weights that {names} make differ from version "
                f"{manifest.stamp.version} in part {part}: their sum is {found[part]}, that of the manifest "
                f"{manifest.sums[part] if part < len(manifest.sums) else 'missing'}"
            )
        self.held = manifest.stamp

    def _take_full(self, folder: str, way: Way, ranks: int, await_free: Callable[[], None]) -> None:
        await_free()
        self.held = None
        self._slices = [slices_of(self.layout, rank, ranks) for rank in range(ranks)]
        for stored in way.files:
            slices, of_file = self._slices[stored.rank], slice(stored.first, stored.last)
            head = bytearray(len(expected := header(slices.layout.entries[of_file])))
            parts = [memoryview(head), *places(slices.spans[of_file], self._weights)]
            started_s = time.monotonic()
            self.folder.read_into(folder, stored.file, parts)
            self.seconds += time.monotonic() - started_s
            if head != expected:
                raise BadFileError(f"{self.folder.at(f'{folder}/{stored.name}')}: has other tensors than the model")
            self.num_bytes += stored.bytes

    def _take_delta(self, folder: str, way: Way, await_free: Callable[[], None]) -> None:
        started_s = time.monotonic()
        found = [(stored.rank, self.folder.read(folder, stored.file)) for stored in way.files]
        self.seconds += time.monotonic() - started_s
        self.num_bytes += sum(len(delta) for _, delta in found)
        await_free()
        self.held = None
        words = self._weights.view(np.uint16)
        for rank, delta in found:
            deltas.apply(memoryview(delta), words, Scattered(self._slices[rank]), check=self.folder.check)

    def _sums(self) -> list[str]:
        """The sums of what is in the buffer."""
        return [one for of in self._slices for one in sums_of(self._weights, of.spans, self.folder.check)]

    def _prove_held(self) -> None:
        if self.held is not None and digest_of(self._sums()) != self.held.digest:
            log.error("the weights in memory have changed", version=self.held.version)
            self.held = None


def read_manifest(folder: Folder, name: str, sha256: str, key: bytes) -> Manifest:
    """The manifest that has this sum and is signed with this key. Raises BadFileError."""
    data = folder.read_small(name)
    if (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise BadFileError(f"{folder.at(name)}: its sha256 is {found}, announced was {sha256}")
    try:
        signed = msgspec.json.decode(data, type=Signed)
        if not signed.is_of(key):
            raise BadFileError(
                f"{folder.at(name)}: was not written by this run: its HMAC-SHA256 is not of the run's key"
            )
        return msgspec.json.decode(signed.manifest, type=Manifest)
    except msgspec.DecodeError as error:
        raise BadFileError(f"{folder.at(name)}: cannot be read: {error}") from None
