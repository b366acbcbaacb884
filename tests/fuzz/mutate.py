"""Makes unsound messages out of sound ones, fast and the same for the same seed."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from asyncrl.errors import ProtocolError
from asyncrl.wire.frames import decode
from tests.fuzz.frames import RUN_ID

ENDING = frozenset({"Shutdown", "Stop", "Scale"})
"""Kinds that end or change the run when they are sound: they are sent unsound only."""

BOUNDARIES: list[Any] = [
    None, True, False, 0, 1, -1, -2, 2, 7, 15, 16, 17, 127, 128, 255, 256, 65535, 65536,
    (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
    -(1 << 31), -(1 << 31) - 1, -(1 << 63), 0.0, -0.0, 0.5, 1e-320, 1e38, 1e39, 1e308, -1e308, 1e12, 1.1e12,
    float("nan"), float("inf"), float("-inf"), "", "a", "\x00",
    "ü" * 201, "x" * 200, "x" * 201, "y" * 70_000, b"", b"\xff\xfe",
    [], [[]], {}, {"": 0}, {"a": {"b": {}}}, [0] * 3, [-1, 0], [1 << 62] * 2, ["failed"] * 2, [float("nan")] * 2,
    [1e308, 1e308], [1e308, -1e308], msgpack.ExtType(5, b"abc"), msgpack.Timestamp(1, 2),
    "failed", "truncated", "shard", "stop",
]  # fmt: skip
DTYPES = ["i4", "f4", "b1", "i8", "O", "", "f8", 4, None]
LENGTHS: list[Any] = [0, 1 << 31, 1 << 63, (1 << 64) - 1, -1, True, 12.0, "12", None, [12], []]
WORDS = [struct.pack("<f", value) for value in (float("nan"), float("inf"), 1e38, 0.0)]
WORDS += [struct.pack("<i", value) for value in (-1, -2, 1, (1 << 31) - 1, -(1 << 31))]
"""Values of an array of either type."""
MAX_STRETCHED_BYTES = 8 << 20
"""So that a message stretched twice does not fill the memory of who makes it."""

Frames = list[bytes]


class Mutator:
    """Draws sound messages from a pool and returns mutated ones; a few of them may still be sound."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.header_ways: list[Callable[[dict[Any, Any], Sequence[Frames]], object]] = [
            self._replace_leaf, self._replace_leaf, self._replace_leaf, self._replace_leaf, self._remove_key,
            self._add_key, self._swap_field, self._lie_about_array, self._stretch_list,
        ]  # fmt: skip

    def mutant(self, pool: Sequence[Frames]) -> Frames:
        """Another message than the one it is made of; never a sound one of a kind that ends the run."""
        while True:
            drawn = self._random.choice(pool)
            frames = self._mutate(list(drawn), pool)
            if frames == drawn:
                continue
            if not any(name.encode() in frame for frame in frames[:1] for name in ENDING) or not _is_sound(frames):
                return frames

    def _mutate(self, frames: Frames, pool: Sequence[Frames]) -> Frames:
        draw = self._random.random()
        if draw < 0.12:
            return self.flip_bits(frames)
        if draw < 0.18:
            return self.cut(frames)
        if draw < 0.26:
            return self.shuffle(frames, pool)
        if draw < 0.28:
            return [self._random.randbytes(self._random.randrange(64)) for _ in range(self._random.randrange(4))] or [
                b""
            ]
        header = msgpack.unpackb(frames[0])
        for _ in range(1 if draw < 0.85 else 3):
            self._random.choice(self.header_ways)(header, pool)
        try:
            frames[0] = msgpack.packb(header)
        except (ValueError, OverflowError):
            return self.flip_bits(frames)
        return frames

    def flip_bits(self, frames: Frames) -> Frames:
        index = self._random.randrange(len(frames))
        damaged = bytearray(frames[index])
        if index and len(damaged) >= 4 and self._random.random() < 0.3:
            at = 4 * self._random.randrange(len(damaged) // 4)
            damaged[at : at + 4] = self._random.choice(WORDS)
            frames[index] = bytes(damaged)
            return frames
        for _ in range(self._random.choice((1, 1, 1, 2, 8)) if damaged else 0):
            damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
        frames[index] = bytes(damaged)
        return frames

    def cut(self, frames: Frames) -> Frames:
        index = self._random.randrange(len(frames))
        frames[index] = frames[index][: self._random.randrange(len(frames[index]) + 1)]
        return frames

    def shuffle(self, frames: Frames, pool: Sequence[Frames]) -> Frames:
        index, other = self._random.randrange(len(frames)), self._random.randrange(len(frames))
        match self._random.randrange(5):
            case 0:
                frames.insert(other, frames[index])
            case 1:
                del frames[index]
            case 2:
                frames[index], frames[other] = frames[other], frames[index]
            case 3:
                frames += self._random.choice(pool)[1:]
            case _:
                frames[index] += self._random.randbytes(self._random.randrange(1, 9))
        return frames or [b""]

    def _value(self, values: list[Any]) -> Any:
        """One of them, as the mutant's own."""
        return copy.deepcopy(self._random.choice(values))

    def _leaf(self, header: dict[Any, Any]) -> tuple[Any, Any]:
        """A place in the header: a container and the key or index in it."""
        container: Any = header if self._random.random() < 0.15 else header.get("body")
        if not isinstance(container, dict) or not container:
            container = header
        while True:
            keys = list(container) if isinstance(container, dict) else range(len(container))
            key = self._random.choice(keys)
            inner = container[key]
            if not isinstance(inner, dict | list) or not inner or self._random.random() < 0.2:
                return container, key
            container = inner

    def _replace_leaf(self, header: dict[Any, Any], _: Sequence[Frames]) -> None:
        container, key = self._leaf(header)
        value = container[key]
        if type(value) in (int, float) and self._random.random() < 0.25:
            container[key] = value + self._random.choice((-1, 1))
        else:
            container[key] = self._value(BOUNDARIES)

    def _remove_key(self, header: dict[Any, Any], _: Sequence[Frames]) -> None:
        container, key = self._leaf(header)
        del container[key]

    def _add_key(self, header: dict[Any, Any], _: Sequence[Frames]) -> None:
        container, _key = self._leaf(header)
        if isinstance(container, dict):
            name = self._random.choice(("x", "", "ticket", "text", b"bytes", "k" * 300))
            container[name] = self._value(BOUNDARIES)
        else:
            container.append(self._value(BOUNDARIES))

    def _swap_field(self, header: dict[Any, Any], pool: Sequence[Frames]) -> None:
        other = msgpack.unpackb(self._random.choice(pool)[0])
        names = [name for name in ("kind", "body", "arrays", "seq") if other[name] != header.get(name)]
        if names:
            name = self._random.choice(names)
            header[name] = other[name]

    def _lie_about_array(self, header: dict[Any, Any], _: Sequence[Frames]) -> None:
        frames = header.get("arrays")
        if not isinstance(frames, list) or not frames:
            header["arrays"] = [[["i4", 0]]]
            return
        specs = self._random.choice(frames)
        spec = self._random.choice(specs) if isinstance(specs, list) and specs else None
        if not isinstance(spec, list) or len(spec) != 2:
            frames.append([["i4", self._value(LENGTHS)]])
            return
        match self._random.randrange(6):
            case 0:
                spec[0] = self._random.choice([name for name in DTYPES if name != spec[0]])
            case 1:
                spec[1] = self._value([length for length in LENGTHS if length != spec[1]])
            case 2 if type(spec[1]) is int:
                spec[1] += self._random.choice((-1, 1))
            case 3:
                specs.remove(spec)
            case 4:
                specs.append(copy.deepcopy(spec))
            case _:
                spec.append(0)

    def _stretch_list(self, header: dict[Any, Any], _: Sequence[Frames]) -> None:
        container, key = self._leaf(header)
        value = container[key]
        times = self._random.choice((0, 2, 2, 3, 40) if self._random.random() < 0.99 else (70_000,))
        if times * _num_bytes(value) > MAX_STRETCHED_BYTES:
            times = 2
        container[key] = value * times if isinstance(value, list | str) else [value] * times


def _num_bytes(value: Any) -> int:
    try:
        return len(msgpack.packb(value))
    except (ValueError, OverflowError):  # it cannot be sent at all
        return 0


def _is_sound(frames: Frames) -> bool:
    try:
        return decode(RUN_ID, frames).kind in ENDING
    except ProtocolError:
        return False
