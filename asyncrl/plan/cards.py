"""GPUs by name, as `asyncrl plan --gpus 8xH100-80` takes them.

Memory is `memory.total` of nvidia-smi (modal-labs/modal-client#2797; of the B200 pytorch/ao#4002; of the H200 and the
RTX 4090 reports of users). Bandwidth of the memory and dense bf16 FLOP/s are of NVIDIA's data sheets; the bandwidth of
the B200 follows from its clocks (pytorch/ao#4002). The rate of an all-reduce in a host is assumed: a bit less than half
of NVLink's in one direction, or of PCIe 4.0 x16 for cards without NVLink.
"""

from __future__ import annotations

import re

from asyncrl.errors import ConfigError
from asyncrl.plan.hardware import Gpu
from asyncrl.util.hints import did_you_mean

MIB = 1 << 20


def _card(memory_mib: int, memory_bytes_per_s: float, flops: float, reduce_bytes_per_s: float) -> Gpu:
    return Gpu(
        memory_bytes=memory_mib * MIB,
        memory_bytes_per_s=memory_bytes_per_s,
        flops=flops,
        reduce_bytes_per_s=reduce_bytes_per_s,
    )


CARDS = {
    "A100-40": _card(40_960, 1.555e12, 312e12, 130e9),
    "A100-80": _card(81_920, 2.039e12, 312e12, 130e9),
    "H100-80": _card(81_559, 3.35e12, 989e12, 200e9),
    "H200-141": _card(143_771, 4.8e12, 989e12, 200e9),
    "B200-180": _card(182_630, 7.7e12, 2250e12, 400e9),
    "L40S-48": _card(46_068, 0.864e12, 362e12, 14e9),
    "RTX4090-24": _card(24_564, 1.008e12, 165e12, 10e9),
}
"""Cards by name."""
EXAMPLE = "8xH100-80, or 4xMINE:48G for a card that is not in the table"
UNITS = {"": 1, "M": 1 << 20, "G": 1 << 30}
MAX_CARDS = 1024


def parse_cards(text: str) -> tuple[int, str, Gpu]:
    """Returns number, name and data of the cards in NxNAME or NxNAME:BYTES. The latter has the memory that is given,
    and all else of an H100 unless the name is in the table. Raises ConfigError."""
    found = re.fullmatch(r"(\d+)x([^:]+)(?::(\d+)([MG]?))?", text.strip())
    if found is None:
        raise ConfigError(f"--gpus {text}: expected {EXAMPLE}")
    count, name = int(found[1]), found[2]
    if not 2 <= count <= MAX_CARDS:
        raise ConfigError(
            f"--gpus {text}: must be from 2 to {MAX_CARDS} cards, one for a generator and one for a learner"
        )
    if found[3] is not None:
        given = CARDS.get(name, Gpu())
        memory_bytes = int(found[3]) * UNITS[found[4]]
        if memory_bytes < UNITS["G"]:
            raise ConfigError(f"--gpus {text}: a card of {memory_bytes:,} bytes; at least 1G")
        return count, name, _card(memory_bytes // MIB, given.memory_bytes_per_s, given.flops, given.reduce_bytes_per_s)
    if name not in CARDS:
        raise ConfigError(
            f"--gpus {text}: no card {name}{did_you_mean(name, CARDS)} Known are {', '.join(sorted(CARDS))}; "
            f"{name}:BYTES gives the memory of another one"
        )
    return count, name, CARDS[name]
