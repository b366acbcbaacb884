"""Builds vLLM engines: their environment and arguments."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.generator.engine import CPU_KV_CACHE_BYTES, GPU_FRACTION
from asyncrl.generator.vllm_backend.patches import prepare_generator
from asyncrl.generator.vllm_backend.scheduling import BatchWatch
from asyncrl.util.files import read_json
from asyncrl.util.model_files import KEY as ROUTING_KEY
from asyncrl.wire.sockets import socket_base

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.llm_engine import LLMEngine

log = structlog.get_logger()

CONDITIONS = {
    # The engine core runs in this process and its steps are called one by one: a version is exact for every token.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # A forked worker would inherit this process's threads and, on a GPU, a driver that it cannot use.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Connections that the engine makes to itself stay on the machine.
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Variables that must have these values; a user's own are replaced, with a warning."""
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Worker processes use the cores of this process; vLLM would want a NUMA node for each.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Nothing of a worker is worth waiting for.
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
}
"""Set unless the user's environment has them. The launcher sets thread counts and cores (OMP_NUM_THREADS, affinity):
inside one process vLLM keeps them."""

DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
"""Sizes in a model's `config.json` that vLLM divides among devices."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in a model's `config.json`."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The sizes that vLLM makes room for."""
WITHOUT_ADAPTERS = "use learner.lora.load=merged"
_ROUTING_REFUSAL = "outed-experts capture"
"""In every message of vLLM about a router that does not tell its choice."""
_WITHOUT_ROUTING = "use generator.engine=transformers, or algorithm.routing_replay=off"


def build_engine(config: Config, seed: int, watch: BatchWatch, more: Mapping[str, Any]) -> LLMEngine:
    """Builds the vLLM engine for `model.path`, as configured in sections `model` and `generator`, with `more` arguments
    of `vllm.EngineArgs`. The batches of its scheduler are watched by `watch`."""
    set_environment(config)
    import torch

    on_gpu = torch.cuda.is_available()
    if config.deterministic and on_gpu:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if not on_gpu:
        check_cpu(config)
    arguments = {**_arguments(config, seed, on_gpu=on_gpu), **more}
    with _environment_of_workers(config.generator.tensor_parallel):
        return _build(config, arguments, watch)


def set_environment(config: Config) -> None:
    """Sets the variables that vLLM reads. Call it before vLLM is imported."""
    needed = CONDITIONS | {
        # For steps of worker processes: the first ones of an engine compile kernels.
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(math.ceil(config.launch.start_timeout_s)),
        # The sockets between the engine and its workers; a path in a long TMPDIR is too long for one.
        "VLLM_RPC_BASE_PATH": str(socket_base()),
    }
    for name, value in needed.items():
        if (former := os.environ.get(name)) not in (None, value):
            log.warning("an environment variable is replaced: the engine needs another value", name=name, was=former,
                        value=value)  # fmt: skip
        os.environ[name] = value
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


@contextmanager
def _environment_of_workers(count: int) -> Iterator[None]:
    """Sets what worker processes find in their environment when they start. Other children of this process get the
    former values, also of LD_PRELOAD, which vLLM sets."""
    import torch

    before = {name: os.environ.get(name) for name in ("LD_PRELOAD", "OMP_NUM_THREADS")}
    os.environ["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // count))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _build(config: Config, arguments: dict[str, Any], watch: BatchWatch) -> LLMEngine:
    import torch
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    prepare_generator()
    context = UsageContext.LLM_CLASS  # sets the default of tokens per step: many prompts, no streaming
    try:
        vllm_config = EngineArgs(**arguments).create_engine_config(context)
    except (TypeError, ValueError) as error:
        options = config.generator.engine_options
        if not options:
            raise
        raise ConfigError(f"generator.engine_options = {options}: vLLM refuses: {error}") from error
    scheduler = vllm_config.scheduler_config
    if arguments.get("async_scheduling") and not scheduler.async_scheduling:
        log.warning("vLLM schedules no batch ahead on this device", option="generator.engine_options.async_scheduling")
    if watch.routing is not None:
        _record_routing(vllm_config, on_gpu=torch.cuda.is_available())
    try:
        engine = LLMEngine.from_vllm_config(vllm_config, usage_context=context, disable_log_stats=True)
        if watch.routing is not None and not vllm_config.use_v2_model_runner:
            engine.collective_rpc("return_routing")
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        reason = explained(error, config.model.path, has_adapter=vllm_config.lora_config is not None)
        if reason is None:
            raise
        raise reason from error
    core: Any = engine.engine_core
    watch.attach(core.engine_core.scheduler, engine.set_weight_version)
    # vLLM warns at every swap about layers without own weights; `Engine.swap` checks that nothing is missing.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    return engine


def explained(error: Exception, path: str, *, has_adapter: bool) -> ConfigError | None:
    """Returns the ConfigError for an error of vLLM about a model without adapters, or whose routers do not tell their
    choice; None for another one."""
    if _ROUTING_REFUSAL in str(error):
        return ConfigError(
            f"{ROUTING_KEY}: the routers of model.path = {path!r} do not tell vLLM their choice ({error}); "
            f"{_WITHOUT_ROUTING}"
        )
    if has_adapter and "lora" in str(error).lower():
        return ConfigError(f"model.path = {path!r}: vLLM has no adapters for this model ({error}); {WITHOUT_ADAPTERS}")
    return None


def _record_routing(config: VllmConfig, *, on_gpu: bool) -> None:
    """Makes vLLM's routers write down their choices. Raises ConfigError if the model runner cannot return them."""
    if on_gpu and not config.use_v2_model_runner:
        raise ConfigError(
            f"{ROUTING_KEY}: vLLM returns experts by its model runner V2 only, and uses V1 here; {_WITHOUT_ROUTING}"
        )
    # After vLLM's own check, which demands a cache of prompts and, on a CPU, a model runner that is not there.
    config.aux_output_config.enable_return_routed_experts = True
    if config.model_config.get_sliding_window() is not None:
        # A cached prompt has no blocks outside of the window, but its tokens there have experts.
        config.cache_config.enable_prefix_caching = False


def _arguments(config: Config, seed: int, *, on_gpu: bool) -> dict[str, Any]:
    generator = config.generator
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "seed": seed,
        "max_num_seqs": generator.max_running_groups * generator.group_size,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # not the sampling defaults that a model ships
        "worker_cls": "asyncrl.generator.vllm_backend.worker_side.EngineWorker",
        "tensor_parallel_size": generator.tensor_parallel,
        "distributed_executor_backend": "mp" if generator.tensor_parallel > 1 else "uni",
        "disable_log_stats": True,
    }
    if on_gpu:
        arguments["gpu_memory_utilization"] = float(os.environ.get(GPU_FRACTION, generator.gpu_memory_utilization))
        arguments["enable_sleep_mode"] = config.launch.colocated
    else:
        arguments["enforce_eager"] = True
        arguments["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES // generator.tensor_parallel
        if config.deterministic:
            # One sequence at a time, since kernels round differently for several. No chunked prefill, since the CPU
            # sampler cannot undo the draw for a chunk that ends before the prompt does.
            arguments |= {"max_num_seqs": 1, "enable_chunked_prefill": False}
    if config.model.dtype == "bfloat16":
        arguments["hf_overrides"] = {"head_dtype": "float32"}  # the learner does not round logits, either
    if config.environment.name is not None:
        # When many environments answer at once, more turns wait than fit: the oldest groups' go first.
        arguments["scheduling_policy"] = "priority"
    if generator.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = generator.kv_cache_bytes // generator.tensor_parallel  # of each device
    arguments |= generator.engine_settings
    if config.deterministic:
        # What runs or is cached next to a completion changes nothing.
        arguments |= {"async_scheduling": False, "enable_prefix_caching": False}
    return arguments


def check_tensor_parallel(config: Config) -> None:
    """Raises ConfigError if vLLM cannot divide the model of `model.path` into `generator.tensor_parallel` parts."""
    parallel = config.generator.tensor_parallel
    if parallel == 1:
        return
    settings = _model_settings(config)
    for name in DIVIDED:
        number = settings.get(name)
        is_repeated = name == "num_key_value_heads" and isinstance(number, int) and parallel % number == 0
        if isinstance(number, int) and number % parallel and not is_repeated:
            rule = "divide or be a multiple of" if name == "num_key_value_heads" else "divide"
            raise ConfigError(
                f"generator.tensor_parallel = {parallel}: must {rule} {name} = {number} in config.json of "
                f"{config.model.path}"
            )


def _model_settings(config: Config) -> dict[str, Any]:
    settings = read_json(Path(config.model.path) / "config.json", "model.path")
    return settings.get("text_config") or settings


def uses_adapter(config: Config) -> bool:
    """True if the engine computes with the base and the adapter."""
    return bool(config.learner.lora.rank) and config.learner.lora.load == "adapter"


def check_adapters(config: Config) -> None:
    """Raises ConfigError if vLLM has no room for adapters of this rank."""
    rank = config.learner.lora.rank
    if uses_adapter(config) and rank > LORA_RANKS[-1]:
        raise ConfigError(
            f"learner.lora.rank = {rank}: vLLM takes adapters of at most {LORA_RANKS[-1]}; {WITHOUT_ADAPTERS}"
        )


def bfloat16_fault() -> str:
    """Why an engine in bfloat16 would crash on this machine's CPU; "" if it would not.

    vLLM's attention uses AMX tiles in bfloat16 where the processor has them. It does not check that the kernel permits
    them to a process: if not, the first such instruction is illegal.
    """
    import torch

    if not torch.cpu._is_amx_tile_supported() or torch.cpu._init_amx():
        return ""
    return (
        "the processor has AMX tiles, which the engine uses in bfloat16, but the kernel does not permit them "
        "(arch_prctl)"
    )


def check_cpu(config: Config) -> None:
    """Raises ConfigError when an engine with `model.dtype`, or with adapters, would crash on this machine's CPU."""
    if uses_adapter(config):
        settings = _model_settings(config)
        if any(settings.get(name) for name in EXPERTS):
            raise ConfigError(
                f"learner.lora.load = 'adapter': vLLM computes a mixture of experts with adapters on GPUs only, and "
                f"{config.model.path} is one; {WITHOUT_ADAPTERS}"
            )
    if config.model.dtype == "bfloat16" and (fault := bfloat16_fault()):
        raise ConfigError(
            f"model.dtype = 'bfloat16': {fault}; use model.dtype=float32, or a kernel (Linux 5.16 or newer) and "
            "container that permit them"
        )
