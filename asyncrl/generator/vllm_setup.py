"""What a vLLM engine is made with: environment, arguments, sampling, and the names of the weights that it takes."""

from __future__ import annotations

import inspect
import logging
import os
from functools import wraps
from typing import TYPE_CHECKING, Any

from asyncrl.config import Config

if TYPE_CHECKING:
    from torch.nn import Module
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

ENVIRONMENT = {
    # The engine core runs in this process and its steps are called one by one: a version is exact for every token.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Connections that the engine makes to itself stay on the machine.
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Set before vLLM is imported, unless the user's environment says else. Thread counts and cores are the launcher's
(OMP_NUM_THREADS, affinity): inside one process vLLM keeps them."""

CPU_KV_CACHE_BYTES = 1 << 30
"""Key-value cache on a CPU when `generator.kv_cache_bytes` is not set."""


def build_engine(config: Config, seed: int) -> LLMEngine:
    """The engine over `model.path`, as sections `model` and `generator` say."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    preload = os.environ.get("LD_PRELOAD")
    import torch

    on_gpu = torch.cuda.is_available()
    if config.deterministic and on_gpu:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    from vllm import EngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    from asyncrl.generator.vllm_plugin import NAME, register

    register()
    generator = config.generator
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "seed": seed,
        "max_model_len": generator.max_model_tokens,
        "max_num_seqs": generator.max_running_groups * generator.group_size,
        "enable_prefix_caching": generator.prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # not the sampling defaults that a model ships
        "weight_transfer_config": WeightTransferConfig(backend=NAME),
        "distributed_executor_backend": "uni",
        "async_scheduling": False,  # a step that is already under way when weights change would blur versions
        "disable_log_stats": True,
    }
    if on_gpu:
        arguments["gpu_memory_utilization"] = generator.gpu_memory_fraction
    else:
        _keep_weights_beside_packed()
        arguments["enforce_eager"] = True
        arguments["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
        if config.deterministic:
            # One at a time, since kernels for several sequences round differently. Prompts in one piece, since the
            # sampler of a CPU cannot take back a draw for a piece that ends before the prompt does.
            arguments |= {"max_num_seqs": 1, "enable_chunked_prefill": False}
    if generator.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = generator.kv_cache_bytes
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    # It warns at every swap of layers without weights of their own; `Engine.swap` checks that nothing is missing.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    # vLLM sets it for children of its own; those of this process keep their allocator.
    if preload is None:
        os.environ.pop("LD_PRELOAD", None)
    else:
        os.environ["LD_PRELOAD"] = preload
    return engine


def _keep_weights_beside_packed() -> None:
    """On a CPU vLLM runs on packed copies of the weights and gives up the weights themselves, so that new ones take a
    reload layer by layer. Where they are kept, new ones are copied into them and packed again."""
    from vllm.model_executor.layers import utils

    pack = inspect.unwrap(utils.dispatch_cpu_unquantized_gemm)

    @wraps(pack)
    def pack_and_keep(layer: Module, remove_weight: bool) -> None:
        pack(layer, remove_weight=False)

    utils.dispatch_cpu_unquantized_gemm = pack_and_keep


def sampling_params(config: Config, temperature: float, top_p: float, seed: int | None = None) -> SamplingParams:
    """How completions are sampled, and what the engine gives of them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # In training top_p, top_k and penalties are neutral: log-probs are those of the full distribution.
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        max_tokens=config.generator.max_new_tokens,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # requests share them, nothing changes them, and a deep copy for each is slow
    )


def checkpoint_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a learner sends for this model; tied weights once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    trust = config.model.trust_remote_code
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(config.model.path, trust_remote_code=trust), trust_remote_code=trust
        )
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
