"""Creates tiny random models of many families, as folders that learner and engine load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    import torch
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
