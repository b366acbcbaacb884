"""Weights that change as those of a model in training, in a store of versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.weights.file_transport import Publisher
from asyncrl.weights.layout import WeightManifest
from asyncrl.weights.version_store import Folder, Reader, manifest_key

LAYOUT = WeightManifest.of(
    [
        ("embed.weight", torch.bfloat16, (300, 64)),
        ("norm.weight", torch.bfloat16, (37,)),
        ("router.bias", torch.float32, (5,)),
        ("empty", torch.bfloat16, (0, 4)),
        ("head.weight", torch.float16, (301, 50)),
    ]
)
FLOAT32 = WeightManifest.of([("embed.weight", torch.float32, (300, 64)), ("norm.weight", torch.float32, (37,))])


KEY = manifest_key("run-0f")


class Model:
    """The bytes of a model; a step changes a hundredth of the weights to a neighbour."""

    def __init__(self, layout: WeightManifest = LAYOUT, seed: int = 0) -> None:
        self.layout = layout
        self.weights = np.zeros(layout.num_bytes, np.uint8)
        self._random = np.random.default_rng(seed)
        for _, tensor in layout.views(torch.from_numpy(self.weights)):
            tensor.copy_(torch.from_numpy(self._random.standard_normal(tensor.shape) * 0.02))

    def step(self, share: float = 0.01) -> None:
        for entry in self.layout.entries:
            words = self.weights[entry.offset : entry.offset + entry.num_bytes].view(np.uint16)
            at = self._random.random(len(words)) < share
            words[at] += self._random.choice([1, 0xFFFF], np.count_nonzero(at)).astype(np.uint16)


def make_publisher(url: str | Path, *, layout: WeightManifest = LAYOUT, **options: Any) -> Publisher:
    options = {"key": KEY, "full_every": 32, "keep": 3} | options
    return Publisher(Folder(str(url)), layout, **options)


def make_reader(url: str | Path, *, layout: WeightManifest = LAYOUT) -> Reader:
    weights = np.zeros(layout.num_bytes, np.uint8)
    for entry in layout.entries:
        weights[entry.offset : entry.offset + entry.num_bytes] = 7
    return Reader(Folder(str(url)), layout, weights, key=KEY)


def no_wait() -> None:
    """The buffer may be written."""


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def assert_holds(reader: Reader, model: Model) -> None:
    assert np.array_equal(reader._weights, model.weights)


def trained(version: int) -> list[tuple[str, torch.Tensor]]:
    """Weights of a model as a learner sends them; a step changes two of a hundred."""
    generator = torch.Generator().manual_seed(0)
    embed = torch.randn(400, 50, generator=generator).to(torch.bfloat16)
    head = torch.randn(300, 31, generator=generator).to(torch.bfloat16)
    for tensor in (embed, head):
        tensor.view(-1)[version::50] += version
    return [("embed.weight", embed), ("norm.weight", torch.full((37,), float(version))), ("head.weight", head)]
