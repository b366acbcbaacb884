"""Computes the GPU memory of each role before any process starts, checks that it fits, and sets each engine's fraction.

Activations are measured on the meta device (`learner.model.memory_trace`); what DeepSpeed and vLLM keep follows from
the sources of their versions 0.19 and 0.32. Varying quantities count with their largest value.
`tests/learner/test_predicted_memory.py` compares the sums with measured memory on a CPU.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from pydantic import ValidationError

from asyncrl.config.config import Config
from asyncrl.config.training import LearnerConfig, Lora
from asyncrl.errors import ConfigError
from asyncrl.generator.engine import STEP_TOKENS
from asyncrl.generator.vllm_backend.setup import LORA_RANKS, uses_adapter
from asyncrl.launch.placement import Placement, RoleResources
from asyncrl.rewards.reward_model import model_options

if TYPE_CHECKING:
    from asyncrl.learner.model.memory_trace import Trace

log = structlog.get_logger()

GIB = 1 << 30
PROCESS_BYTES = 2 * GIB
"""CUDA context, workspaces of cuBLAS and cuDNN, NCCL's channels, and fragmentation of the allocator; what a process
keeps while another one uses its GPU (`launch.colocate`)."""
BUCKET_ELEMENTS = 50_000_000
"""Gradients that the ranks exchange at a time from ZeRO stage 1 on (`learner.model.settings`)."""
PLAIN_BUCKET_ELEMENTS = 500_000_000
"""The same without ZeRO: DeepSpeed's default."""
STEP_ELEMENTS = 1_000_000_000
"""Weights that the optimizer updates at a time with ZeRO stage 3: DeepSpeed's default."""
Parts = dict[str, int]
"""Bytes by use of the memory."""
ENGINE_STEP_TOKENS = 16384
"""Tokens of one step of the engine: the largest default of vLLM's `LLM`, which `build_engine` takes."""
CPU_STEP_TOKENS = 4096
"""The same on a CPU."""
GRAPH_BYTES = 2 * GIB
"""CUDA graphs and workspaces of an engine."""
STAGING_MARGIN_BYTES = GIB
"""NCCL's channels between learner and generators, and the allocator's rounding."""
STAGING_BUCKET_BYTES = 64 << 20
"""Size of the buckets in which weights are sent (`weights.layout.BUCKET_BYTES`); a larger matrix has a separate one,
except the vocabulary's."""
TRAINED_FRACTION = 0.95
"""Usable fraction of a GPU without an engine; with an engine it is `generator.gpu_memory_utilization`."""
REWARD_MODEL = {"dtype": "float32", "tokens_per_batch": 16384, "device": "auto"}
"""Options of the reward model that determine its memory, with their defaults."""
PIECE = "piece of the weights"
"""The part of a learner rank that versions pass through, if they come from its GPU memory."""
NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
}
EXPERTS = ".experts."
"""In the names of parameters of which a token uses a few experts' parts."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder model."""

    folder: str
    """The folder with its `config.json`."""
    parameters: int
    """Parameters of the complete model, tied ones once."""
    active: int
    """Parameters that one token uses."""
    layer: int
    """Parameters of the largest layer."""
    layers: int
    hidden: int
    intermediate: int
    """Feed-forward size for one token; in a mixture of experts, the sum over the experts of the token."""
    query: int
    """Heads times head size."""
    key_value: int
    """Key-value heads times head size."""
    heads: int
    key_value_heads: int
    vocabulary: int
    window: int | None
    adapters: int = 0
    """Parameters of the adapters that are trained in place of the model; 0 if the model is trained."""

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return self.adapters or self.parameters

    @classmethod
    def of(cls, settings: dict[str, Any], folder: str, sizes: dict[str, int], layer: int) -> Shape | None:
        """Returns the shape of a model with this `config.json` and these numbers of elements by parameter; None if
        sizes are missing in the former."""
        settings = settings.get("text_config") or settings
        sizes_by_name = {
            key: number
            for key, names in NAMES.items()
            if isinstance(number := next((settings[n] for n in names if n in settings), None), int)
        }
        if sizes_by_name.keys() != NAMES.keys():
            return None
        hidden, heads = sizes_by_name["hidden"], sizes_by_name["heads"]
        head = settings.get("head_dim") or hidden // heads
        dense = settings.get("intermediate_size") or settings.get("ffn_dim") or settings.get("n_inner") or 4 * hidden
        experts, share = settings.get("num_experts_per_tok"), 1.0
        if experts:
            share = experts / (settings.get("num_experts") or settings.get("num_local_experts") or experts)
        key_value_heads = settings.get("num_key_value_heads") or heads
        return cls(
            folder=folder,
            parameters=sum(sizes.values()),
            active=round(sum(n * share if EXPERTS in name else n for name, n in sizes.items())),
            layer=layer,
            intermediate=experts * (settings.get("moe_intermediate_size") or dense) if experts else dense,
            query=heads * head,
            key_value=key_value_heads * head,
            key_value_heads=key_value_heads,
            window=settings.get("max_position_embeddings"),
            **sizes_by_name,
        )

    @classmethod
    def read(
        cls, folder: str, *, trust_remote_code: bool = False, values: bool = False, lora: Lora | None = None
    ) -> Shape | None:
        """Returns the shape of the model in a folder, from its `config.json` alone; with `values`, of a critic with its
        layers; with `lora`, of a policy with these adapters. Raises ConfigError if transformers cannot build the
        model."""
        settings = json.loads((Path(folder) / "config.json").read_text())
        from asyncrl.learner.model.loading import largest_layer

        model = empty_model_of(folder, trust_remote_code, values=values)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        shape = cls.of(settings, folder, sizes, largest_layer(model))
        if shape is None or lora is None or not lora.rank:
            return shape
        from asyncrl.weights.model_tensors import adapter_shapes

        return replace(shape, adapters=sum(math.prod(sizes) for sizes in adapter_shapes(model, lora).values()))


def empty_model_of(folder: str, trust_remote_code: bool, *, values: bool, **options: Any) -> Any:
    """Returns the model in a folder without its weights; `options` are those of `empty_model`."""
    from asyncrl.learner.model.memory_trace import empty_model, read_model_config  # imports torch

    model_config = read_model_config(folder, trust_remote_code=trust_remote_code)
    return empty_model(model_config, values=values, trust_remote_code=trust_remote_code, **options)


def item_bytes(dtype: str) -> int:
    """Returns the size of one element in bytes."""
    return {"float32": 4, "bfloat16": 2}[dtype]


def trained_parts(config: Config, shape: Shape, ranks: int, *, of: str = "", on_gpu: bool = True) -> Parts:
    """Returns the memory of one rank for a trained model: weights, optimizer and gradients, partitioned by ZeRO,
    without those of `host_parts`."""
    parts = _states(config, shape, ranks, in_host=False)
    if _stage(config) == 3:
        parts["bucket of gradients"] = _bucket_bytes(shape.trained, on_gpu=on_gpu)
    return {f"{of}{name}": num_bytes for name, num_bytes in parts.items()}


def host_parts(config: Config, shape: Shape, ranks: int) -> Parts:
    """Returns what one rank keeps in host memory of a trained model, by `learner.offload`."""
    return _states(config, shape, ranks, in_host=True)


def _states(config: Config, shape: Shape, ranks: int, *, in_host: bool) -> Parts:
    size, total, stage = item_bytes(config.model.dtype), shape.trained, _stage(config)
    sharded = -(-total // ranks)
    weights = shape.parameters + shape.adapters
    parts = {
        "weights": size * (-(-weights // ranks) if stage == 3 else weights),
        "float32 copy of the weights": 4 * sharded if stage else 0,
        "optimizer states": 8 * (sharded if stage else total),
        "gradients": 4 * (sharded if stage >= 2 else total),
    }
    offload = config.learner.offload
    moved = {"none": (), "optimizer": tuple(parts)[1:], "all": tuple(parts)}[offload]
    return {name: num_bytes for name, num_bytes in parts.items() if (name in moved) == in_host}


def _bucket_bytes(parameters: int, *, on_gpu: bool) -> int:
    """The memory of the buffer in which gradients are collected. On a CPU only the used pages count."""
    return 4 * (BUCKET_ELEMENTS if on_gpu else min(BUCKET_ELEMENTS, parameters))


def learner_parts(
    config: Config,
    shape: Shape,
    *,
    reference: Shape | None,
    critic: Shape | None,
    sends: bool,
    on_gpu: bool = True,
) -> Parts:
    """Returns the memory of one learner rank. `critic` is trained in this process; `sends` is True if the rank sends
    its share of the weights from the GPU: a copy of it, unless `weights.staging` is buckets. With adapters the
    reference policy is the policy without them."""
    ranks, size = config.launch.learners, item_bytes(config.model.dtype)
    parts = trained_parts(config, shape, ranks, on_gpu=on_gpu)
    passes = _passes(config, shape, ranks, on_gpu=on_gpu)
    if critic is not None:
        parts |= trained_parts(config, critic, ranks, of="critic: ", on_gpu=on_gpu)
        others = _passes(config, critic, ranks, values=True, on_gpu=on_gpu)
        passes = max(passes, others, key=lambda parts: sum(parts.values()))
    if reference is not None and not shape.adapters:
        count = -(-reference.parameters // ranks) if config.learner.zero_stage == 3 else reference.parameters
        parts["reference"] = size * count
    if sends and config.weights.staging != "buckets":
        parts["weights to send"] = size * -(-shape.trained // ranks)
    return parts | passes


def critic_parts(config: Config, shape: Shape) -> Parts:
    """Returns the memory of one critic rank in a separate process."""
    ranks = config.critic.ranks
    return trained_parts(config, shape, ranks) | _passes(config, shape, ranks, values=True)


def _passes(config: Config, shape: Shape, ranks: int, *, values: bool = False, on_gpu: bool = True) -> Parts:
    tokens = max(config.learner.tokens_per_microbatch, longest_tokens(config))
    size, stage = item_bytes(config.model.dtype), _stage(config)
    trace = trace_micro_batch(config, shape, tokens, values=values, on_gpu=on_gpu)
    passes = {
        f"activations of {tokens} tokens": trace.forward_bytes,
        "output layer and backward pass": trace.peak_bytes - trace.forward_bytes,
        "exchange of gradients": _exchange_bytes(config, trace, shape.trained, ranks, on_gpu=on_gpu),
    }
    sharded = -(-shape.trained // ranks)
    copies = 4 * (min(sharded, STEP_ELEMENTS) if stage == 3 else sharded) if stage else 0
    if config.learner.offload != "none":
        copies = 0
    if copies > sum(passes.values()):
        passes = {"gradients in the optimizer": copies}
    gathered = 0
    if stage == 3 and (ranks > 1 or config.learner.offload == "all"):
        # Two layers, and the output layer or the embeddings.
        gathered = size * min(shape.parameters, 2 * shape.layer + shape.vocabulary * shape.hidden)
    return passes | {"gathered weights": gathered, "process": PROCESS_BYTES if on_gpu else 0}


def _exchange_bytes(config: Config, trace: Trace, parameters: int, ranks: int, *, on_gpu: bool) -> int:
    full, stage, passes = min(BUCKET_ELEMENTS, parameters), _stage(config), trace.peak_bytes
    if stage == 0:
        return max(0, 4 * min(PLAIN_BUCKET_ELEMENTS, parameters) - passes)
    buckets, done = _bucket_bytes(parameters, on_gpu=on_gpu), full / parameters
    if stage == 3:
        return max(0, 8 * full - round(passes * done))
    # On a GPU the exchange overlaps with the backward pass, for which there are two buckets.
    buckets *= 2 if on_gpu else 1
    if config.learner.offload != "none":
        return max(0, 4 * full + buckets - round(passes * done))
    if stage == 2 and item_bytes(config.model.dtype) == 2:
        # Buckets in bfloat16, each of which is added to the sum of the gradients after a copy in float32.
        copies = 4 * full + buckets // 2
    else:
        # Memory for all reduced gradients of the rank, in addition to the sum of those of earlier micro-batches.
        copies = 4 * -(-parameters // ranks) + buckets
    layer = trace.layers_bytes - trace.forward_bytes
    left = 0 if done == 1 else round(trace.forward_bytes * (1 - done)) + layer
    return max(0, copies + left - passes)


def trace_micro_batch(config: Config, shape: Shape, tokens: int, *, values: bool, on_gpu: bool) -> Trace:
    """Returns the measured memory of a micro-batch (`learner.model.memory_trace`); for the critic with `values`."""
    model = {"values": values, "dtype": config.model.dtype, "checkpointing": config.learner.gradient_checkpointing}
    options = {
        "entropy_gradient": config.algorithm.entropy_coef > 0,
        "on_gpu": on_gpu,
        "exchanged": _stage(config) > 0,
        "sequence_parallel": config.learner.sequence_parallel,
    }
    folder = shape.folder, config.model.trust_remote_code
    return _traced(folder, (tokens, longest_tokens(config)), tuple(model.items()), tuple(options.items()))


@functools.cache
def _traced(
    folder: tuple[str, bool], tokens: tuple[int, int], model: tuple[tuple[str, Any], ...], options: tuple[Any, ...]
) -> Trace:
    from asyncrl.learner.model.memory_trace import trace, typical_micro_batch  # imports torch

    return trace(empty_model_of(*folder, **dict(model)), typical_micro_batch(*tokens), **dict(options))


def _stage(config: Config) -> int:
    return max(config.learner.zero_stage, 1) if item_bytes(config.model.dtype) == 2 else config.learner.zero_stage


def longest_tokens(config: Config) -> int:
    """Returns the maximum length of a trajectory that the config allows, in tokens."""
    longest = config.generator.max_new_tokens + (config.data.max_prompt_tokens or 0)
    return min(longest, config.generator.max_model_tokens or longest)


def engine_parts(config: Config, shape: Shape, *, on_gpu: bool = True) -> Parts:
    """Returns the memory of an engine on each of its devices, with the smallest key-value cache that it can start
    with. On a CPU vLLM has a second copy of all matrices, packed for its products."""
    size, parallel = item_bytes(config.model.dtype), config.generator.tensor_parallel
    window = config.generator.max_model_tokens or shape.window or longest_tokens(config)
    is_eager = config.generator.engine == "transformers"
    step_tokens = config.generator.engine_options.get("max_num_batched_tokens")
    if not isinstance(step_tokens, int):
        step_tokens = ENGINE_STEP_TOKENS if on_gpu else CPU_STEP_TOKENS
        step_tokens = STEP_TOKENS["cuda" if on_gpu else "cpu"] if is_eager else step_tokens
    sequences = config.generator.max_running_groups * config.generator.group_size
    cache, of = cache_bytes(config, shape, window), f"keys and values of {window} tokens"
    if config.generator.kv_cache_bytes:
        cache, of = config.generator.kv_cache_bytes // parallel, "key-value cache"
    matrices = shape.layers * shape.layer + 2 * shape.vocabulary * shape.hidden
    step = 2 * shape.intermediate // parallel + 6 * shape.hidden
    return {
        "weights": size * shape.parameters // parallel,
        "packed weights": 0 if on_gpu or is_eager else size * matrices // parallel,
        f"a step of {step_tokens} tokens": step_tokens * size * step,
        f"logits of {sequences} sequences": sequences * (5 if is_eager else 3) * 4 * shape.vocabulary,
        "adapter": _adapter_bytes(config, shape),
        "CUDA graphs": GRAPH_BYTES if on_gpu and not is_eager else 0,
        of: cache,
    }


def cache_bytes(config: Config, shape: Shape, tokens: int) -> int:
    """Returns the memory of the keys and values of `tokens` tokens on each device of an engine. With more devices than
    key-value heads each device has one head."""
    heads = -(-shape.key_value_heads // config.generator.tensor_parallel)
    head_size = shape.key_value // shape.key_value_heads
    return tokens * 2 * shape.layers * heads * head_size * item_bytes(config.model.dtype)


def staging_parts(config: Config, shape: Shape, *, on_gpu: bool) -> Parts:
    """Returns the GPU memory of a generator in addition to its engine: with NCCL the complete next version of the
    weights, or two buckets of them, with ipc two buckets, otherwise, and where adapters are merged, one tensor at a
    time from host memory. Adapters are staged alone."""
    size, weights, lora = item_bytes(config.model.dtype), config.weights, config.learner.lora
    if lora.rank:
        staging = size * (shape.adapters + (shape.vocabulary * shape.hidden if lora.load == "merged" else 0))
    elif not on_gpu:
        staging = size * shape.vocabulary * shape.hidden
    elif config.hands_over or weights.staging in ("host", "buckets") or config.generator.tensor_parallel > 1:
        staging = 2 * max(STAGING_BUCKET_BYTES, size * shape.intermediate * shape.hidden)
    else:
        staging = size * shape.parameters
    return {"staged weights": staging, "process": STAGING_MARGIN_BYTES}


def _adapter_bytes(config: Config, shape: Shape) -> int:
    lora, size = config.learner.lora, item_bytes(config.model.dtype)
    if not uses_adapter(config):
        return 0
    if config.generator.engine == "transformers":
        return size * shape.adapters
    room = next((rank for rank in LORA_RANKS if rank >= lora.rank), lora.rank)
    return size * (shape.adapters + shape.adapters * room // lora.rank)


def reward_model_parts(shape: Shape, *, dtype: str, tokens: int) -> Parts:
    """Returns the memory of the reward model's process with batches of `tokens` tokens."""
    size = item_bytes(dtype)
    return {
        "weights": size * shape.parameters,
        f"activations of {tokens} tokens": tokens * size * (3 * shape.intermediate + 8 * shape.hidden),
        "process": PROCESS_BYTES,
    }


@dataclass(frozen=True)
class Models:
    """Shapes of the models of a run; None for models that the run does not have."""

    policy: Shape
    reference: Shape | None = None
    critic: Shape | None = None
    reward_model: Shape | None = None

    @classmethod
    def read(cls, config: Config, *, reward_model: bool) -> Models | None:
        """Reads the shapes from the model folders of the config; None if a `config.json` lacks the sizes."""
        from asyncrl.learner.algorithm import make_algorithm  # imports torch

        algorithm, path = config.algorithm, config.model.path
        paths = {"policy": path}
        if algorithm.kl_reward_coef or algorithm.kl_loss_coef:
            paths["reference"] = algorithm.reference or path
        if make_algorithm(config).needs_critic:
            paths["critic"] = config.critic.path or path
        if reward_model:
            paths["reward_model"] = str(model_options(config)["path"])
        trust = config.model.trust_remote_code
        shapes = {
            role: Shape.read(
                folder,
                trust_remote_code=trust,
                values=role in ("critic", "reward_model"),
                lora=config.learner.lora if role == "policy" else None,
            )
            for role, folder in paths.items()
        }
        for role, shape in shapes.items():
            if shape is None:
                log.warning("memory is not checked: config.json lacks the model's sizes", model=paths[role])
                return None
        return cls(**{role: shape for role, shape in shapes.items() if shape is not None})


@dataclass(frozen=True)
class Need:
    """The GPU memory that one role process needs."""

    name: str
    parts: Parts

    @property
    def num_bytes(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        largest = sorted(self.parts.items(), key=lambda part: -part[1])
        parts = ", ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in largest if num_bytes >= 0.05 * GIB)
        return f"{self.name} {self.num_bytes / GIB:.1f} GiB ({parts})"


@dataclass(frozen=True)
class GpuNeeds:
    """A GPU and the needs of the roles placed on it."""

    name: str
    memory_bytes: int
    needs: list[Need]
    limit_bytes: int
    """Upper bound of the sum of the needs."""
    in_turn: bool = False
    """True if the learner rank and the generator use it in turn (`launch.colocate`). Unless it `hands_over`, the next
    version comes through host memory, so that this needs no more than the generator."""
    hands_over: bool = False
    """True if the next version comes from the learner's memory on it."""

    @property
    def needed_bytes(self) -> int:
        """The most that is needed at a time."""
        if not self.in_turn:
            return self._beside()
        return max(*map(self._beside, ("learner-", "generator-")), self.hand_over_bytes)

    @property
    def hand_over_bytes(self) -> int:
        """The memory that is needed while the engine loads the learner's weights: those of both, and the pieces."""
        if not self.hands_over:
            return 0
        moving = sum(need.parts.get(part, 0) for need in self.needs for part in ("weights", PIECE, "staged weights"))
        return self._beside("learner-", "generator-") + moving

    @property
    def generating_bytes(self) -> int:
        """The memory that is needed while engines generate."""
        return self._beside("learner-") if self.in_turn else self._beside()

    def _beside(self, *sleeping: str) -> int:
        return sum(
            min(PROCESS_BYTES, need.num_bytes) if need.name.startswith(sleeping) else need.num_bytes
            for need in self.needs
        )

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the needs exceed the limit; 0 if they fit."""
        return max(0, self.needed_bytes - self.limit_bytes)

    def __str__(self) -> str:
        return (
            f"GPU {self.name} ({self.memory_bytes / GIB:.1f} GiB, of which {self.limit_bytes / GIB:.1f} may be used): "
            + "; ".join(map(str, self.needs))
            + (f"; in turn {self.needed_bytes / GIB:.1f} GiB" if self.in_turn else "")
        )


def fit_memory(config: Config, placement: Placement, *, reward_model: bool) -> Placement:
    """Returns the placement with `gpu_memory_utilization` set for each engine.

    Raises ConfigError with the sums, and the settings that would help, if a GPU is too small. If the memory of the GPUs
    or the sizes of a model are unknown, engines on one GPU divide `generator.gpu_memory_utilization` equally.
    """
    if not placement.gpus:
        return placement
    one_host = len({resources.host for resources in (*placement.learners, *placement.generators)}) == 1
    known = one_host and all(gpu.memory_bytes is not None for gpu in placement.gpus)
    models = Models.read(config, reward_model=reward_model) if known else None
    if models is None:
        return _divided(config, placement)
    gpus = needs_of_gpus(config, placement, models)
    if short := [gpu for gpu in gpus if gpu.missing_bytes]:
        raise ConfigError(_refusal(config, placement, models, short))
    for gpu in gpus:
        log.info("computed memory needs", gpu=str(gpu))
    return _with_fractions(config, placement, models, gpus)


def needs_of_gpus(config: Config, placement: Placement, models: Models) -> list[GpuNeeds]:
    """Returns every GPU of the placement that has roles, with their needs."""
    needs = list(_needs(config, placement, models))
    engines = {gpu for resources in placement.generators for gpu in resources.gpus}
    used: list[GpuNeeds] = []
    for gpu in placement.gpus:
        roles, memory_bytes = [need for name, need in needs if name == gpu.name], gpu.memory_bytes or 0
        fraction = config.generator.gpu_memory_utilization if gpu.name in engines else TRAINED_FRACTION
        in_turn, limit_bytes = config.launch.colocated and gpu.name in engines, round(fraction * memory_bytes)
        if roles:
            used.append(GpuNeeds(gpu.name, memory_bytes, roles, limit_bytes, in_turn, config.hands_over))
    return used


def _needs(config: Config, placement: Placement, models: Models) -> Iterator[tuple[str, Need]]:
    from_gpu = sends_from_gpus(config, placement)
    for rank, resources in enumerate(placement.learners):
        yield resources.gpus[0], learner_need(config, models, rank, from_gpu=from_gpu)
    for rank, resources in enumerate(placement.critics):
        yield resources.gpus[0], Need(f"critic-{rank}", critic_parts(config, models.critic or models.policy))
    for index, resources in enumerate(placement.generators):
        for number, gpu in enumerate(resources.gpus):
            yield gpu, generator_need(config, models, index, number, from_gpu=from_gpu)
    options: dict[str, Any] = REWARD_MODEL | model_options(config)
    if placement.reward_model is not None and models.reward_model is not None and options["device"] != "cpu":
        tokens, dtype = int(options["tokens_per_batch"]), str(options["dtype"])
        parts = reward_model_parts(models.reward_model, dtype=dtype, tokens=tokens)
        yield placement.reward_model.gpus[0], Need("reward_model", parts)


def learner_need(config: Config, models: Models, rank: int, *, from_gpu: bool) -> Need:
    """Returns the need of a learner rank; with `from_gpu` weights are sent from GPU to GPU."""
    inside = models.critic if not config.critic.ranks else None
    copies = from_gpu and config.weights.staging != "buckets"
    parts = learner_parts(config, models.policy, reference=models.reference, critic=inside, sends=copies)
    if config.hands_over:
        parts[PIECE] = STAGING_BUCKET_BYTES
    return Need(f"learner-{rank}", parts)


def generator_need(config: Config, models: Models, index: int, gpu: int, *, from_gpu: bool) -> Need:
    """Returns the need of one of a generator's GPUs, by its number, with the smallest key-value cache that its engine
    can start with. The first GPU has the staged weights."""
    parts = engine_parts(config, models.policy)
    if gpu == 0:
        parts |= staging_parts(config, models.policy, on_gpu=from_gpu or config.hands_over)
    return Need(f"generator-{index}", parts)


def sends_from_gpus(config: Config, placement: Placement) -> bool:
    """True if weights are sent from GPU to GPU."""
    from asyncrl.weights.transports import transport_on_gpus  # imports torch

    return placement.sends_between_gpus and transport_on_gpus(config).on_device


def _with_fractions(config: Config, placement: Placement, models: Models, gpus: list[GpuNeeds]) -> Placement:
    staged = sum(staging_parts(config, models.policy, on_gpu=sends_from_gpus(config, placement)).values())
    least = sum(engine_parts(config, models.policy).values())
    fractions: dict[str, float] = {}
    for gpu in gpus:
        engines = [need for need in gpu.needs if need.name.startswith("generator-")]
        if not engines:
            continue
        others = gpu.generating_bytes - sum(need.num_bytes for need in engines)
        engine_bytes = (gpu.limit_bytes - others) // len(engines) - staged
        if config.generator.kv_cache_bytes is not None:
            engine_bytes = min(engine_bytes, least)  # the engine uses no more, and requires that this much is free
        fractions[gpu.name] = engine_bytes / gpu.memory_bytes
    return _set_fractions(placement, lambda resources: min(fractions[gpu] for gpu in resources.gpus))


def _divided(config: Config, placement: Placement) -> Placement:
    counts = Counter(gpu for resources in placement.generators for gpu in resources.devices)
    most = config.generator.gpu_memory_utilization
    return _set_fractions(placement, lambda resources: most / max(counts[gpu] for gpu in resources.devices))


def _set_fractions(placement: Placement, fraction: Callable[[RoleResources], float]) -> Placement:
    generators = tuple(
        replace(resources, gpu_memory_utilization=fraction(resources)) for resources in placement.generators
    )
    return replace(placement, generators=generators)


def _refusal(config: Config, placement: Placement, models: Models, short: list[GpuNeeds]) -> str:
    lines = "\n  ".join(map(str, short))
    advice = "no setting of these keys is enough: use more ranks (launch.learners, critic.ranks) or a smaller model"
    if changes := find_changes(config, placement, models):
        advice = f"with {' '.join(changes)} it would fit"
    return f"this run is estimated not to fit its GPUs:\n  {lines}\n{advice}"


def find_changes(config: Config, placement: Placement, models: Models) -> list[str]:
    """Returns a small set of overrides with which the same placement fits, found greedily; empty if none suffice."""
    tried: list[tuple[str, Any]] = []
    for change in _candidates(config, placement):
        tried.append(change)
        if _fits(config, placement, models, tried):
            break
    else:
        return []
    for change in tried[-2::-1]:
        fewer = [other for other in tried if other is not change]
        if _fits(config, placement, models, fewer):
            tried = fewer
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in dict(tried).items()]


def _candidates(config: Config, placement: Placement) -> Iterator[tuple[str, Any]]:
    if config.model.dtype != "bfloat16":
        yield "model.dtype", "bfloat16"
    longest = longest_tokens(config)
    if config.data.max_prompt_tokens is not None and (config.generator.max_model_tokens or longest + 1) > longest:
        yield "generator.engine_options.max_model_len", longest
    tokens = config.learner.tokens_per_microbatch
    while tokens // 2 >= max(longest, 4096):
        tokens //= 2
        yield "learner.tokens_per_microbatch", tokens
    if not config.learner.gradient_checkpointing:
        yield "learner.gradient_checkpointing", True
    for stage in range(config.learner.zero_stage + 1, 4 if config.launch.learners > 1 else 0):
        yield "learner.zero_stage", stage
    if sends_from_gpus(config, placement):
        yield "weights.transport", "gloo"
    if config.hands_over:
        yield "weights.transport", "auto"
    if config.learner.offload == "none":
        if config.learner.zero_stage == 0:
            yield "learner.zero_stage", 1
        yield "learner.offload", "optimizer"


def _fits(config: Config, placement: Placement, models: Models, changes: list[tuple[str, Any]]) -> bool:
    config = with_changes(config, dict(changes))
    try:
        LearnerConfig.model_validate(config.learner.model_dump())
    except ValidationError:
        return False
    return not any(gpu.missing_bytes for gpu in needs_of_gpus(config, placement, models))


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """Returns the config with these values of dotted keys, which are not checked."""
    for key, value in changes.items():
        section, name, *option = key.split(".")
        settings = getattr(config, section)
        value = {**getattr(settings, name), option[0]: value} if option else value
        config = config.model_copy(update={section: settings.model_copy(update={name: value})})
    return config


def choose_staging(config: Config, placement: Placement, *, reward_model: bool) -> tuple[Config, str]:
    """Returns the config with the staging that auto stands for, and one line about the choice; it is empty if there is
    none.

    With the transport ipc that is buckets. Without GPUs, and where the memory of the GPUs or the sizes of the model are
    unknown, it is `whole`; also if complete versions are estimated to fit on the GPUs with everything else. Otherwise,
    buckets with NCCL if the engine can load them while the learner has its weights, else host.
    """
    if config.weights.staging != "auto":
        return config, ""
    if config.hands_over:
        return with_changes(config, {"weights.staging": "buckets"}), ""
    whole = with_changes(config, {"weights.staging": "whole"})
    known = all(gpu.memory_bytes is not None for gpu in placement.gpus)
    models = Models.read(config, reward_model=reward_model) if placement.gpus and known else None
    if models is None:
        return whole, ""
    from_gpu = sends_from_gpus(config, placement)
    name = "whole"
    if not from_gpu:
        name = "host"
    elif any(gpu.missing_bytes for gpu in needs_of_gpus(whole, placement, models)):
        name = "buckets" if takes_buckets(config, models.policy) else "host"
    chosen = with_changes(config, {"weights.staging": name})
    needed = staging_parts(chosen, models.policy, on_gpu=from_gpu)["staged weights"]
    return chosen, f"weights    staging {name}: {needed / GIB:.1f} GiB on the first GPU of each generator"


def takes_buckets(config: Config, shape: Shape) -> bool:
    """True if the engine can load weights in buckets while the learner has its own."""
    is_reloaded = config.generator.engine == "vllm" and shape.active != shape.parameters
    return not (is_reloaded or config.learner.lora.rank or config.launch.colocated)
