"""Estimates of the speed of generation and training on a GPU, by roofline; nothing is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, and what models reach on it. Defaults are of an H100 SXM."""

    memory_bytes: float = 80e9
    memory_bytes_per_s: float = 3.35e12
    flops: float = 989e12
    """Dense bfloat16 operations per second."""
    engine_bandwidth: float = 0.7
    """Fraction of the bandwidth that decoding reaches; assumed, as all below without a source."""
    engine_flops: float = 0.5
    """Fraction of the operations per second that decoding reaches."""
    step_s: float = 4e-3
    """Fixed time of an engine step."""
    host_sequence_s: float = 20e-6
    """Time that a step's sequence takes of the engine's Python thread, which works while the GPU does: a third of the
    48 to 68 us measured on a core of a small virtual machine."""
    reduce_s: float = 10e-6
    """Fixed time of an all-reduce."""
    reduce_bytes_per_s: float = 200e9
    """Rate of an all-reduce within a host."""
    dense_mfu: float = 0.35
    """Model FLOPs utilization of the learner; 0.38 to 0.43 in Llama 3 (arXiv:2407.21783)."""
    moe_mfu: float = 0.2
    train_flops: float = 10
    """Operations of a trained token and active weight: forward, backward, recomputed, scored once."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained."""

    answer_tokens: float
    """Mean length of a completion."""
    prompt_tokens: float
    context: float = 0.6
    """Tokens before a token of a completion, on average, in mean lengths; 0.5 with equal lengths."""
    goodput: float = 0.7
    """Fraction of the generated tokens that is trained; the others have no signal."""

    @property
    def mean_context(self) -> float:
        """Tokens before a token that is decoded, on average."""
        return self.prompt_tokens + self.context * self.answer_tokens


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that its speed depends on."""

    parameters: float
    active: float
    """Parameters that a token uses."""
    layers: int
    hidden: int
    kv_heads: int
    head_size: int = 128

    @property
    def bytes(self) -> float:
        """Bytes of the weights in bfloat16."""
        return 2 * self.parameters

    @property
    def is_moe(self) -> bool:
        """True if a token uses a part of the weights only."""
        return self.active < self.parameters

    def cache_bytes(self, tp: int) -> float:
        """Bytes of keys and values of a token in bfloat16, on all GPUs of an engine: with more GPUs than key-value
        heads each GPU has a copy of one head."""
        return 2 * 2 * self.layers * max(self.kv_heads, tp) * self.head_size


def generation_rate(model: ModelShape, gpu: Gpu, job: Job, *, tp: int, sequences: float) -> float:
    """Returns the tokens of one GPU of an engine, per second, that are trained later."""
    return sequences / (decode_s(model, gpu, job, tp=tp, sequences=sequences) * tp) * job.goodput


def decode_s(model: ModelShape, gpu: Gpu, job: Job, *, tp: int, sequences: float) -> float:
    """Returns the seconds of an engine step, in which each sequence gets a token: weights and caches are read,
    multiplied, and summed over the engine's GPUs twice in each layer. With many sequences of a small model the
    engine's Python thread takes longer."""
    running = max(sequences, 1.0)
    read_bytes = model.bytes + running * model.cache_bytes(tp) * job.mean_context
    read_s = read_bytes / (tp * gpu.memory_bytes_per_s * gpu.engine_bandwidth)
    multiply_s = 2 * model.active * running / (tp * gpu.flops * gpu.engine_flops)
    shared_bytes = 2 * (tp - 1) / tp * running * model.hidden * 2
    reduce_s = gpu.reduce_s + shared_bytes / gpu.reduce_bytes_per_s if tp > 1 else 0.0
    gpu_s = read_s + multiply_s + gpu.step_s + 2 * model.layers * reduce_s
    return max(gpu_s, gpu.host_sequence_s * running)
