"""The constants of `asyncrl plan --fleet`, each with its source: GPUs, links, models, failures, and the job."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

ASSUMED = "assumed"
"""Source of a constant that nobody has measured for this purpose."""


def _given(value: float, meaning: str, source: str) -> Any:
    """A field with its value, what it is, and where the value is from."""
    return field(default=value, metadata={"meaning": meaning, "source": source})


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, and what models reach on it. Defaults are of an H100 SXM."""

    memory_bytes: float = _given(80e9, "memory", "data sheet")
    memory_bytes_per_s: float = _given(3.35e12, "its bandwidth", "data sheet")
    flops: float = _given(989e12, "bf16, dense, a second", "data sheet")
    per_host: int = _given(8, "GPUs of a host", "DGX H100")
    engine_memory: float = _given(0.9, "of the memory for an engine", "vLLM's default")
    engine_bandwidth: float = _given(0.7, "of the bandwidth reached by decoding", ASSUMED)
    engine_flops: float = _given(0.5, "of the FLOP/s reached by decoding", ASSUMED)
    step_s: float = _given(4e-3, "of an engine step, whatever runs", ASSUMED)
    reduce_s: float = _given(10e-6, "of an all-reduce, whatever its size", ASSUMED)
    reduce_bytes_per_s: float = _given(200e9, "of an all-reduce in a host", ASSUMED)
    max_sequences: int = _given(1024, "that an engine decodes at once", ASSUMED)
    dense_mfu: float = _given(0.35, "MFU of the learner, dense", "0.38 to 0.43 in Llama 3 (arXiv:2407.21783)")
    moe_mfu: float = _given(0.2, "MFU of the learner, MoE", ASSUMED)
    train_flops: float = _given(10, "FLOPs a trained token and active weight", "backward, recomputed, scored once")
    state_bytes: float = _given(16, "bytes a weight for the learner", "bf16 weights and gradients, AdamW in float32")
    learner_bytes: float = _given(60e9, "of the memory for them, the rest for activations", ASSUMED)


@dataclass(frozen=True, slots=True)
class Links:
    """Networks, and the ways of weights and groups."""

    stream_bytes_per_s: float = _given(2.5e9, "one TCP stream, as gloo has it", ASSUMED)
    host_bytes_per_s: float = _given(12.5e9, "a host's network for TCP", "100 GbE")
    nccl_bytes_per_s: float = _given(25e9, "NCCL, into one GPU", "half of 400 Gb/s InfiniBand")
    nccl_member_s: float = _given(20e-6, "NCCL, for each GPU that receives", ASSUMED)
    message_s: float = _given(1e-4, "one message from host to host", ASSUMED)
    far_bytes_per_s: float = _given(2.5e6, "a far generator's link", "20 Mb/s")
    changed: float = _given(0.012, "of the weights change in a step, lr 1e-6", "measured, 100 M weights, step 24")
    delta_bytes: float = _given(1.31, "a changed weight, compressed", "measured, same")
    encode_s: float = _given(2.6e-9, "encoding a delta, each weight, one rank", "measured, same")
    apply_s: float = _given(10e-9, "applying it, each changed weight", ASSUMED)
    load_bytes_per_s: float = _given(10e9, "weights from a host to each of its GPUs", ASSUMED)
    queue_group_s: float = _given(0.56e-3, "the queue's core, each group", "fit: 0.7 ms at 118 KB")
    queue_byte_s: float = _given(1.22e-9, "the same, each byte", "and 2.8 ms at 1.84 MB")
    token_bytes: float = _given(13, "a token in a group", "its arrays")


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures, and what a restart costs."""

    gpu_s: float = _given(54 * 86_400 * 16_384 / 419, "of a GPU between two", "419 in 54 days on 16,384, Llama 3")
    restart_s: float = _given(60, "a restart of the learners by itself", ASSUMED)
    manual_s: float = _given(1_800, "until someone starts a dead run again", ASSUMED)
    saved_bytes: float = _given(14, "bytes a weight in a checkpoint", "bf16 weights, AdamW in float32")
    copy_bytes_per_s: float = _given(20e9, "a GPU's share to its host, training waits", ASSUMED)
    write_bytes_per_s: float = _given(2e9, "a host's share to storage, and back", ASSUMED)
    least_interval_s: float = _given(300, "between two checkpoints, at least", ASSUMED)


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained."""

    answer_tokens: float = _given(8_192, "mean length of an answer", ASSUMED)
    prompt_tokens: float = _given(300, "of a prompt", ASSUMED)
    context: float = _given(0.6, "of the mean answer before a token, on average", "0.5 with equal lengths")
    group_size: int = _given(8, "answers of a prompt", ASSUMED)
    goodput: float = _given(0.7, "of the generated tokens are trained", "the rest has no signal")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model, as its card and config.json on the hub say."""

    name: str
    source: str
    parameters: float
    active: float
    """Parameters that a token uses."""
    layers: int
    hidden: int
    kv_heads: int
    head_size: int = 128

    @property
    def bytes(self) -> float:
        """Bytes of the weights in bf16."""
        return 2 * self.parameters

    @property
    def is_moe(self) -> bool:
        """True if a token uses a part of the weights only."""
        return self.active < self.parameters

    def cache_bytes(self, tp: int) -> float:
        """Bytes of keys and values of a token in bf16, on all GPUs of an engine: with more GPUs than key-value heads
        each GPU has a copy of one head."""
        return 2 * 2 * self.layers * max(self.kv_heads, tp) * self.head_size


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("1.5B", "Qwen2.5-1.5B", 1.54e9, 1.54e9, layers=28, hidden=1536, kv_heads=2),
        ModelShape("7B", "Qwen2.5-7B", 7.61e9, 7.61e9, layers=28, hidden=3584, kv_heads=4),
        ModelShape("32B", "Qwen2.5-32B", 32.5e9, 32.5e9, layers=64, hidden=5120, kv_heads=8),
        ModelShape("70B", "Llama-3.1-70B", 70.6e9, 70.6e9, layers=80, hidden=8192, kv_heads=8),
        ModelShape("235B-A22B", "Qwen3-235B-A22B", 235e9, 22e9, layers=94, hidden=4096, kv_heads=4),
    )
}
"""Models by the name that `--model` takes."""


@dataclass(frozen=True, slots=True)
class Constants:
    """All constants but the model."""

    gpu: Gpu = field(default_factory=Gpu)
    links: Links = field(default_factory=Links)
    failures: Failures = field(default_factory=Failures)
    job: Job = field(default_factory=Job)


def constants_in_use(given: Constants) -> list[tuple[str, float, str, str]]:
    """Every constant: class and field, value, meaning and source."""
    return [
        (f"{type(part).__name__}.{one.name}", getattr(part, one.name), one.metadata["meaning"], one.metadata["source"])
        for part in (given.gpu, given.links, given.failures, given.job)
        for one in fields(part)
    ]
