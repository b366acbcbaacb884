"""A fingerprint of a model's files: learner and generators that send adapters alone must have the same base."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from asyncrl.util.files import read_tensor_descriptions

SAMPLE_BYTES = 4096
"""Bytes of each tensor, in its middle and at its end, that are part of the fingerprint."""


def fingerprint_of(folder: str) -> str:
    """Returns a hash of the weights in the safetensors files of a folder: of the name, dtype and shape of each tensor,
    and of samples of its bytes, so that it takes milliseconds. It does not depend on how tensors are divided into
    files."""
    tensors: list[tuple[str, str, bytes]] = []
    for path in sorted(Path(folder).glob("*.safetensors")):
        described = read_tensor_descriptions(path)
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            for name, tensor in described.items():
                begin, end = (start + offset for offset in tensor["data_offsets"])
                sample = b""
                for at in (begin + (end - begin) // 2, max(begin, end - SAMPLE_BYTES)):
                    file.seek(at)
                    sample += file.read(min(SAMPLE_BYTES, end - at))
                tensors.append((name, json.dumps([tensor["dtype"], tensor["shape"]]), sample))
    digest = hashlib.sha256()
    for name, description, sample in sorted(tensors):
        digest.update(json.dumps([name, description, hashlib.sha256(sample).hexdigest()]).encode())
    return digest.hexdigest()
