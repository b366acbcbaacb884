"""What a version in a store consists of, how it is proven, and the way from one version to another.

    URL/v000120-1f0c9a02/   full-00000.safetensors ...  from-000119.delta  manifest.json
    URL/v000121-77ab03d1/   from-000120.delta  from-000120-1.delta  from-000112.delta ...  manifest.json

Each learner rank writes its slices (`weights/shares.py`); `-1` stands for rank 1. A version has a folder, whose name no
other attempt has. Its manifest is written last: a folder without one does not exist. Whoever has the sha256 of a
manifest can prove everything: the manifest has the sums of its files and of the result, and the sha256 of earlier
manifests. A manifest is signed with a key that only the processes of its run have. So the store is not trusted, nor
whoever passes an announcement on.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import xxhash
from msgspec import Meta
from numpy.typing import NDArray

from asyncrl.wire.bounds import MAX_INDEX, Count, Index, Number
from asyncrl.wire.version_messages import FolderName, Sha256

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
    """A file of a version, with a rank's slices (`weights/shares.py`) of the tensors from `first` to before `last` of
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
