"""Tiny random models of many families, and a table of those that the learner can pack and for which the engine computes
the same log-probs: `python -m benchmarks.families [--engine ENGINE] [FAMILY ...]`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.generator.engine import Completion, Engine, make_engine
from asyncrl.learner.batch import make_batch
from asyncrl.learner.model.loading import load_policy_model
from asyncrl.learner.model.model_checks import check_packing
from asyncrl.learner.model.policy import PolicyNetwork
from asyncrl.types import Group, Trajectory

VOCABULARY = 96
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "n_inner": 96,
         "eos_token_id": 1, "bos_token_id": 2, "rotary_dim": 16}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_WINDOWED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
          "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma": {},
    "gemma3_text": _WINDOWED | {"query_pre_attn_scalar": 32},
    "phi3": {},
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS | {"norm_topk_prob": True},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 64},
    "olmoe": _EXPERTS,
    "granitemoe": _EXPERTS,
    "phimoe": _EXPERTS | {"router_jitter_noise": 0.5},
    "deepseek_v3": _EXPERTS
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "first_k_dense_replace": 1,
       "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
       "head_dim": 16, "num_key_value_heads": 2},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "biogpt": {},
    "phi": {},
    "persimmon": {},
    "starcoder2": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOWED,
    "granite": {},
    "glm": {},
    "glm4": {},
    "smollm3": {},
    "exaone4": {},
    "ernie4_5": {},
    "seed_oss": {},
    "hunyuan_v1_dense": {},
    "apertus": {},
    "cohere": {"logit_scale": 1.0},
    "cohere2": _WINDOWED | {"logit_scale": 1.0},
    "gemma2": {},
    "gpt_oss": _EXPERTS,
    "llama4_text": _EXPERTS | {"intermediate_size_mlp": 96},
    "qwen3_next": _EXPERTS | _DELTA | {"shared_expert_intermediate_size": 64},
    "qwen3_5_text": _DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax": {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": _DELTA["layer_types"]},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "state_size": 8, "n_groups": 1},
    "falcon_mamba": {"state_size": 8},
    "jamba": {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
              "mamba_d_state": 8},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA
    | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0, "shared_intermediate_size": 96,
       "position_embedding_type": "rope"},
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 128},
    "bloom": {"n_layer": 2, "n_head": 2},
    "codegen": _GPT2 | {"n_head": 4, "n_embd": 128},
    "xglm": {"vocab_size": VOCABULARY, "d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 2},
    "falcon": {"head_dim": None},
    "gptj": _GPT2,
    "gpt_neo": {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    "mpt": {"vocab_size": VOCABULARY, "d_model": 64, "n_heads": 2, "n_layers": 2},
    "nemotron": {},
    "stablelm": {},
}  # fmt: skip
"""Settings by model type of transformers, in addition to the sizes common to all."""


def save_family(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Writes a model of the type `name` and a tokenizer with one word for each of VOCABULARY tokens. The random float32
    weights are much larger than usual initial weights, so that every part of the model has an effect."""
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    settings = FAMILIES[name]
    sizes = {} if settings.keys() & {"n_embd", "d_model"} else _SIZES
    merged = {key: value for key, value in (sizes | settings).items() if value is not None}
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **merged))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0").save_pretrained(folder)
    return folder


def main() -> None:
    """Prints each row of the table after its measurement, for all families or for those that are named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families")
    parser.add_argument("--engine", default="vllm", help="generator.engine")
    parser.add_argument("families", nargs="*")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print("| model type | packed rows | engine = learner | float32, start | float32, swapped | bfloat16, mean |")
    print("|---|---|---|---|---|---|")
    for name in arguments.families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            save_family(name, Path(folder))
            packed = packs(Path(folder))
            cells = engine_cells(Path(folder), arguments.engine) if packed == "yes" else ["", "", "", ""]
            print(f"| {name} | {packed} | {' | '.join(cells)} |", flush=True)


def packs(folder: Path) -> str:
    """Returns the cell on whether the learner accepts the model, or why not."""
    try:
        network = load(folder, "float32")
        with torch.no_grad():
            check_packing(network.model, network, torch.device("cpu"), "model.path")
    except ConfigError as error:
        text = str(error)
        found = re.search(r"differ by \S+|models with [^:]* cannot|\((\w+Error)", text)
        return f"no: {found.group(0).strip('(') if found else text}"
    return "yes"


def engine_cells(folder: Path, engine: str) -> list[str]:
    """Returns the cells on whether engine and learner agree, or why not, and on the differences in both dtypes."""
    try:
        sampler = partial(sample_apart, engine_name=engine)
        found = {dtype: compare(folder, dtype, sampler) for dtype in ("float32", "bfloat16")}
    except EngineError as error:
        return [f"no: {error}", "", "", ""]
    agrees = all(comparison.agrees(dtype) for dtype, comparison in found.items())
    single = found["float32"]
    return ["yes" if agrees else "no", f"{single.start:.0e}", f"{single.swapped:.0e}", f"{found['bfloat16'].mean:.3f}"]


NO_ENGINE = (ValueError, RuntimeError, NotImplementedError, AssertionError, AttributeError, KeyError, TypeError)
"""Errors that vLLM raises for models that it cannot run."""
SAMPLING_S = 300.0
"""Deadline for an engine to start, to sample, and to sample again with other weights."""
PROMPTS = [[3 + (7 * i + 5 * j) % (VOCABULARY - 3) for j in range(4 + 3 * i)] for i in range(6)]


class EngineError(Exception):
    """The engine returned no log-probs to compare with; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Absolute differences between the engine's and the learner's log-probs of the tokens that the engine sampled, in
    nats."""

    start: float
    """Largest difference with the weights that both read from the folder."""
    swapped: float
    """Largest difference with other weights, which the running engine received from the learner."""
    mean: float
    """The larger of the two mean differences."""

    def agrees(self, dtype: str) -> bool:
        """True if the differences are explained by rounding. In bfloat16, a router that chooses another expert for a
        token increases the largest difference, but hardly the mean."""
        return max(self.start, self.swapped) < 1e-4 if dtype == "float32" else self.mean < 0.1


def family_config(folder: Path, dtype: str, engine: str = "vllm") -> Config:
    return load_config(
        None,
        {
            "model.path": str(folder),
            "model.dtype": dtype,
            "data.train": "unused.parquet",
            "generator.engine": engine,
            "generator.group_size": 2,
            "generator.max_running_groups": 4,
            "generator.max_new_tokens": 24,
            "generator.engine_options": {"max_model_len": 256},
            "generator.kv_cache_bytes": 16 << 20,
        },
    )


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    """Adds noise to every weight, of a third of its usual size."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.add_(0.3 * noise * parameter.std().nan_to_num(0.1).clamp(min=0.05))


def sample(folder: Path, dtype: str, disturbed: Path, engine_name: str = "vllm") -> list[list[Completion]]:
    """Returns an engine's completions of PROMPTS with the folder's model: with the model's own weights, and after a
    swap to those in the file `disturbed`. Raises ConfigError or one of NO_ENGINE if the engine cannot run the model."""
    engine = make_engine(family_config(folder, dtype, engine_name), seed=1)
    try:
        engine.use_own_weights(0)
        before = complete(engine)
        engine.swap(1, list(load_file(disturbed).items()))
        return [before, complete(engine)]
    finally:
        engine.close()


def sample_apart(folder: Path, dtype: str, disturbed: Path, engine_name: str = "vllm") -> list[list[Completion]]:
    """Returns the result of `sample` in a separate process, like a generator: vLLM runs some families with classes of
    transformers, which it patches for the complete process. Raises EngineError if that process fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([engine_name, "benchmarks.families"])  # libraries are named as their engines
    answers, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, folder, dtype, disturbed, engine_name))
    process.start()
    sender.close()
    try:
        if not answers.poll(SAMPLING_S):
            raise EngineError(f"no answer within {SAMPLING_S:g} s")
        answer = answers.recv()
    except EOFError:
        process.join(SAMPLING_S)
        raise EngineError(f"the engine's process ended with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if isinstance(answer, str):
        raise EngineError(answer)
    return answer


def _answer(sender: Connection, *arguments: Any) -> None:
    try:
        sender.send(sample(*arguments))
    except (ConfigError, *NO_ENGINE) as error:
        sender.send(f"{type(error).__name__}: {str(error).splitlines()[0]}")


def complete(engine: Engine) -> list[Completion]:
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt)
    done: dict[str, Completion] = {}
    while engine.num_running:
        done |= {completion.key: completion for completion in engine.step()}
    return [done[str(index)] for index in range(len(PROMPTS))]


@torch.no_grad()
def differences(completions: list[Completion], network: PolicyNetwork) -> Tensor:
    """Returns the absolute differences of the log-probs of all sampled tokens, in nats. The network scores them in
    packed rows."""
    trajectories = [trajectory(prompt, done) for prompt, done in zip(PROMPTS, completions, strict=True)]
    (micro,) = make_batch([Group(0, 0, 0, 0, "", 0, 0, trajectories)], tokens_per_microbatch=10_000).micro_batches
    return network(micro)[0] - micro.behavior_logprobs


def trajectory(prompt: list[int], completion: Completion) -> Trajectory:
    before = np.zeros(len(prompt))
    return Trajectory(
        tokens=np.array(prompt + completion.tokens, dtype=np.int32),
        action_mask=np.concatenate([before, np.ones(len(completion.tokens))]).astype(bool),
        behavior_logprobs=np.concatenate([before, completion.logprobs]).astype(np.float32),
        versions=np.concatenate([before - 1, completion.versions]).astype(np.int32),
        status=completion.status,
        routing=completion.routing,
    )


def load(folder: Path, dtype: str) -> PolicyNetwork:
    config = family_config(folder, dtype)
    return PolicyNetwork(config, load_policy_model(config, str(folder))).eval()


def compare(
    folder: Path, dtype: str, sampler: Callable[[Path, str, Path], list[list[Completion]]] = sample
) -> Comparison:
    """Returns the comparison for the folder's model in this dtype. Raises ConfigError or one of NO_ENGINE if the model
    cannot be used."""
    start, other = load(folder, dtype), load(folder, dtype)
    disturb(other.model)
    disturbed = folder / "disturbed.weights"  # a *.safetensors file would be read as a part of the model
    save_file({name: weight.detach().contiguous() for name, weight in other.model.named_parameters()}, disturbed)
    before, swapped = sampler(folder, dtype, disturbed)
    differ = differences(before, start), differences(swapped, other)
    largest = [float(d.abs().max()) for d in differ]
    return Comparison(*largest, max(float(d.abs().mean()) for d in differ))


if __name__ == "__main__":
    main()
