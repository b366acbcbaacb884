"""How long a version of the weights takes to all engines, on paper, by each way to send it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from asyncrl.plan.hardware import Constants, Links, ModelShape
from asyncrl.weights.files.links import STRIDES, stride_of

CHUNK_BYTES = (1e6, 64e6)
"""Smallest and largest chunk of a chain."""


@dataclass(frozen=True, slots=True)
class Deliveries:
    """Seconds until all engines have a version."""

    tree_s: float
    """gloo's broadcast: each member sends complete weights on."""
    chain_s: float
    """Each engine passes chunks to the next."""
    nccl_s: float
    """NCCL's broadcasts: every learner rank sends its slices, and each engine takes all of them into one GPU."""
    shards_s: float
    """Every host of the learner sends its part to every host with engines."""
    delta_s: float
    """What changed, by tree or chain."""
    spread_s: float
    """The part of it in which the changes travel."""
    delta_bytes: float
    far_s: float
    """What changed, over a far generator's link."""

    @property
    def fastest(self) -> tuple[str, float]:
        """The transport that takes the least time, and its seconds."""
        times = {
            "tree": self.tree_s, "chain": self.chain_s, "NCCL": self.nccl_s, "shards": self.shards_s,
            "delta": self.delta_s,
        }  # fmt: skip
        return min(times.items(), key=lambda pair: pair[1])

    def far_stride(self, step_s: float) -> int | None:
        """Every how many steps a far generator gets a version, with steps of `step_s`; None if it cannot follow."""
        return stride_of(self.far_s / step_s)


def deliveries_of(model: ModelShape, constants: Constants, *, engines: int, tp: int, learners: int) -> Deliveries:
    """The deliveries to these engines."""
    links, per_host = constants.links, constants.gpu.per_host
    changed = links.changed * model.parameters
    delta_bytes = changed * links.delta_bytes
    spread_s = min(tree_s(delta_bytes, engines, links), chain_s(delta_bytes, engines, links))
    encode_s = links.encode_s * model.parameters / learners
    apply_s = links.apply_s * changed / tp + model.bytes / (links.load_bytes_per_s * tp)
    senders, receivers = math.ceil(learners / per_host), math.ceil(engines * tp / per_host)
    return Deliveries(
        tree_s=tree_s(model.bytes, engines, links),
        chain_s=chain_s(model.bytes, engines, links),
        nccl_s=model.bytes / links.nccl_bytes_per_s + links.nccl_member_s * engines,
        shards_s=model.bytes / links.host_bytes_per_s * max(1.0, receivers / senders),
        delta_s=encode_s + spread_s + apply_s,
        spread_s=spread_s,
        delta_bytes=delta_bytes,
        far_s=delta_bytes / links.far_bytes_per_s,
    )


def tree_s(num_bytes: float, receivers: int, links: Links) -> float:
    """Seconds of a broadcast by a binary tree: in each round every member that has the bytes sends them to another."""
    return math.ceil(math.log2(receivers + 1)) * num_bytes / links.stream_bytes_per_s


def chain_s(num_bytes: float, receivers: int, links: Links) -> float:
    """Seconds until the last chunk is through a chain of receivers, with the chunk that makes it shortest."""
    size = best_chunk_bytes(num_bytes, receivers, links)
    return (num_bytes / size + receivers - 1) * (links.message_s + size / links.stream_bytes_per_s)


def best_chunk_bytes(num_bytes: float, receivers: int, links: Links) -> float:
    """The size at which the derivative of `chain_s` is 0, within CHUNK_BYTES and not above the bytes themselves."""
    least, most = CHUNK_BYTES
    best = math.sqrt(num_bytes * links.message_s * links.stream_bytes_per_s / max(receivers - 1, 1e-9))
    return min(max(best, least), most, num_bytes)


def delta_of_steps(steps: int) -> float:
    """The bytes of a delta over this many steps, in those of a single step: by the power laws through STRIDES."""
    pairs = list(pairwise(STRIDES))
    (few, small), (many, large) = next((pair for pair in pairs if steps <= pair[1][0]), pairs[-1])
    return small * (max(steps, 1) / few) ** (math.log(large / small) / math.log(many / few))
