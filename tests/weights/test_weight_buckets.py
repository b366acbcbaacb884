"""The flat buffer: layout, buckets, checksum, and refusal of what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from weight_parts import manifest_of

from asyncrl.errors import ConfigError, InvariantError, ProtocolError, RunError
from asyncrl.weights.buffers import WeightBuffer, checksum, weighted_sum
from asyncrl.weights.layout import MAX_MANIFEST_BYTES, ROW_BYTES, WeightManifest
from asyncrl.weights.transports import choose_transport

CPU = torch.device("cpu")


def mixed_weights() -> list[tuple[str, torch.Tensor]]:
    """Tensors of several dtypes; sizes that need padding, one larger than a bucket of one row."""
    generator = torch.Generator().manual_seed(0)
    return [
        ("a", torch.randn(3, 5, generator=generator)),
        ("b", torch.randn(7, generator=generator).to(torch.bfloat16)),
        ("scalar", torch.tensor(3.0, dtype=torch.float64)),
        ("large", torch.randn(40, 33, generator=generator)),
        ("count", torch.arange(9, dtype=torch.int64)),
    ]


def total(buffer: torch.Tensor, bucket_bytes: int) -> int:
    starts = range(0, buffer.numel(), bucket_bytes)
    return sum(checksum(buffer[at : at + bucket_bytes], at) for at in starts) % (1 << 64)


def test_pack_keeps_every_byte() -> None:
    weights = mixed_weights()
    buffer = WeightBuffer(manifest_of(weights), CPU, pinned=False, bucket_bytes=1 << 20)
    buffer.fill(weights)
    manifest = WeightManifest.from_json(buffer.manifest.to_json())
    assert manifest == buffer.manifest
    assert buffer.data.numel() % ROW_BYTES == 0
    for (name, tensor), (packed_name, packed) in zip(weights, manifest.views(buffer.data), strict=True):
        assert (packed_name, packed.dtype) == (name, tensor.dtype)
        assert torch.equal(packed, tensor)


def test_pack_is_a_copy() -> None:
    weights = mixed_weights()
    buffer = WeightBuffer(manifest_of(weights), CPU, pinned=False, bucket_bytes=1 << 20)
    buffer.fill(weights)
    before = weights[0][1].clone()
    weights[0][1].fill_(9.0)
    assert torch.equal(buffer.manifest.views(buffer.data)[0][1], before)


@pytest.mark.parametrize("bucket_bytes", [ROW_BYTES, 3 * ROW_BYTES + 5, 1 << 20])
def test_buckets_cover_the_buffer_and_do_not_change_the_checksum(bucket_bytes: int) -> None:
    weights = mixed_weights()
    buffer = WeightBuffer(manifest_of(weights), CPU, pinned=False, bucket_bytes=bucket_bytes)
    buffer.fill(weights)
    parts = list(buffer.buckets(timeout_s=5.0, check=lambda: None))
    assert torch.equal(torch.cat(parts), buffer.data)
    assert all(part.numel() <= max(bucket_bytes, ROW_BYTES) for part in parts)


@pytest.mark.parametrize("of", [lambda bucket: checksum(bucket, 0), weighted_sum], ids=["host", "gpu"])
def test_checksum_sees_each_bit_changed_signs_and_exchanged_rows(of: Callable[[torch.Tensor], object]) -> None:
    """The sum of a GPU runs on the CPU here, as the same operations of torch."""
    generator = torch.Generator().manual_seed(1)
    buffer = torch.randint(0, 256, (8 * ROW_BYTES + 12,), dtype=torch.uint8, generator=generator)
    for byte in (*range(5 * ROW_BYTES + 16, 5 * ROW_BYTES + 24), *range(7 * ROW_BYTES, 7 * ROW_BYTES + 8), -1):
        for bit in range(8):
            flipped = buffer.clone()
            flipped[byte] ^= 1 << bit
            assert of(flipped) != of(buffer), (byte, bit)
    signs = buffer.clone()
    signs[7 : 8 * ROW_BYTES : 8] ^= 0x80  # of every fourth bfloat16
    exchanged = torch.cat([buffer[ROW_BYTES : 2 * ROW_BYTES], buffer[:ROW_BYTES], buffer[2 * ROW_BYTES :]])
    shifted = torch.cat([torch.zeros(2, dtype=torch.uint8), buffer])[2:]
    assert len({of(one) for one in (buffer, signs, exchanged)}) == 3 and of(shifted) == of(buffer)


def test_checksum_sees_exchanged_buckets() -> None:
    buffer = torch.randint(0, 256, (8 * ROW_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    exchanged = torch.cat([buffer[4 * ROW_BYTES :], buffer[: 4 * ROW_BYTES]])
    assert total(buffer, 4 * ROW_BYTES) != total(exchanged, 4 * ROW_BYTES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights[:-1], "count is missing"),
        (lambda weights: [*weights, ("extra", torch.zeros(1))], "extra .* nothing more"),
        (
            lambda weights: [("a", torch.zeros(5, 3)), *weights[1:]],
            r"a torch.float32 \(5, 3\) where .* \(3, 5\)",
        ),
        (lambda weights: [("a", weights[0][1].double()), *weights[1:]], "torch.float64"),
        (lambda weights: [weights[1], weights[0], *weights[2:]], "b torch.bfloat16"),
    ],
)
def test_other_weights_than_the_first_are_refused(change, message: str) -> None:
    buffer = WeightBuffer(manifest_of(mixed_weights()), CPU, pinned=False, bucket_bytes=1 << 20)
    with pytest.raises(InvariantError, match=message):
        buffer.fill(change(mixed_weights()))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        json.dumps({"weights": [], "bytes": 0}),
        json.dumps({"weights": [["a", "float33", [2]]], "bytes": 1024}),
        json.dumps({"weights": [["a", "float32", [-2]]], "bytes": 1024}),
        json.dumps({"weights": [["a", "float32", [2]]], "bytes": 2048}),
        json.dumps({"weights": [["a", "float32", [2]], ["a", "float32", [2]]], "bytes": 1024}),
    ],
)
def test_a_manifest_that_does_not_add_up_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="manifest"):
        WeightManifest.from_json(text)


def test_a_manifest_that_is_too_long_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("it is parsed"))
    with pytest.raises(ProtocolError, match=f"{MAX_MANIFEST_BYTES + 1} bytes, at most {MAX_MANIFEST_BYTES} are read"):
        WeightManifest.from_json(b" " * (MAX_MANIFEST_BYTES + 1))


def test_transport_is_nccl_only_where_every_process_has_a_gpu_of_its_own() -> None:
    assert choose_transport("auto", ["cpu", "cpu"]) == "gloo"
    assert choose_transport("auto", ["cuda a", "cuda b"]) == "nccl"
    assert choose_transport("auto", ["cuda a", "cuda a"]) == "gloo"
    assert choose_transport("auto", ["cuda a", "cpu"]) == "gloo"
    assert choose_transport("gloo", ["cuda a", "cuda b"]) == "gloo"
    with pytest.raises(ConfigError, match=r"weights\.transport = 'mpi'"):
        choose_transport("mpi", ["cpu"])
    with pytest.raises(RunError, match="GPU of its own"):
        choose_transport("nccl", ["cpu", "cpu"])


def test_buckets_come_as_they_are_filled() -> None:
    weights = [("a", torch.arange(ROW_BYTES, dtype=torch.int32)), ("b", torch.ones(ROW_BYTES, dtype=torch.int32))]
    buffer = WeightBuffer(manifest_of(weights), CPU, pinned=False, bucket_bytes=ROW_BYTES)
    seen: list[int] = []

    def filled():
        taken = buffer.buckets(timeout_s=5.0, check=lambda: None)
        for name, tensor in weights:
            yield name, tensor
            # All of a tensor but what shares a bucket with the next one is there before that is asked for.
            seen.extend(next(taken).numel() for _ in range(tensor.nbytes // ROW_BYTES))

    buffer.fill(filled())
    assert sum(seen) == buffer.data.numel()


def test_a_copy_that_fails_or_takes_too_long_ends_the_broadcast() -> None:
    buffer = WeightBuffer(manifest_of(mixed_weights()), CPU, pinned=False, bucket_bytes=ROW_BYTES)
    with pytest.raises(RunError, match=r"the learner did not copy a bucket of them within 0\.05 s"):
        next(buffer.buckets(timeout_s=0.05, check=lambda: None))
    with pytest.raises(InvariantError):
        buffer.fill([("other", torch.zeros(1))])
    with pytest.raises(RunError, match="could not copy"):
        next(buffer.buckets(timeout_s=5.0, check=lambda: None))
