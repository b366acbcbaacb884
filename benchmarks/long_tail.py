"""A workload with long-tailed lengths: the demo's prompts with a model whose completions have log-normal lengths.

The next token depends only on the last one: a completion stays in a class with a fixed mean length, passes through the
phases of the class, and ends. The means of the classes are quantiles of a log-normal distribution. The complete network
is computed as in any other model, but its layers add 0 to the residual stream.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.demo import prepare

MODEL = Path("demo/long-tail-model")
MEAN_TOKENS, MAX_TOKENS, SIGMA = 64, 256, 1.0
"""SIGMA is the standard deviation of the logarithm of the lengths."""
VOCABULARY, HIDDEN, LAYERS, HEADS, WINDOW_TOKENS = 64, 192, 2, 6, 512
CLASSES, PHASES = 15, 3
FIRST = VOCABULARY - CLASSES * PHASES - 1
"""Token of the first phase of the first class. Lower tokens belong to the tokenizer."""
END = 1
PHASES_VARIANCE = 0.3949
"""Variance of the logarithm of a sum of PHASES exponential times."""
NEVER = 1e-13
GROUP_SIZE, GROUPS_PER_STEP, RUNNING_GROUPS = 8, 16, 4


def prepare_long_tail() -> str:
    """Creates the data and the model if they do not exist. Returns the model's folder."""
    prepare()
    if not (MODEL / "config.json").exists():
        _make_model()
    return str(MODEL)


def settings(model: str, *, steps: int, max_staleness: int) -> list[str]:
    """Returns overrides of the demo for this workload. The learning rate is so small that the lengths do not change."""
    return [
        f"model.path={model}", "recipe=null", f"steps={steps}", f"replay.max_staleness={max_staleness}",
        "replay.zero_variance=train", f"replay.groups_per_step={GROUPS_PER_STEP}", "learner.lr=1e-12",
        "learner.warmup_steps=0", f"generator.group_size={GROUP_SIZE}", f"generator.max_new_tokens={MAX_TOKENS}",
        f"generator.max_running_groups={RUNNING_GROUPS}", "checkpoint.every_steps=null", "journal.retention=all",
    ]  # fmt: skip


def transitions() -> np.ndarray:
    """Returns the transition probabilities [token, next token]."""
    table = np.full((VOCABULARY, VOCABULARY), NEVER)
    firsts = FIRST + PHASES * np.arange(CLASSES)
    table[:FIRST, firsts] = 1.0 / CLASSES
    for first, mean_tokens in zip(firsts, class_means(), strict=True):
        leave = PHASES / mean_tokens
        for token in range(first, first + PHASES):
            table[token, token] = 1.0 - leave
            table[token, END if token == first + PHASES - 1 else token + 1] = leave
    table[-1, END] = 1.0
    return table / table.sum(1, keepdims=True)


def class_means() -> np.ndarray:
    """Returns the mean tokens of each class, such that truncated completions have MEAN_TOKENS on average."""
    from statistics import NormalDist

    spread = (SIGMA**2 - PHASES_VARIANCE) ** 0.5
    normal = NormalDist(0.0, spread)
    shape = np.exp([normal.inv_cdf((number + 0.5) / CLASSES) for number in range(CLASSES)])
    dice = np.random.default_rng(0).gamma(PHASES, 1 / PHASES, (10_000, 1))
    low, high = 1.0, 4.0 * MEAN_TOKENS
    for _ in range(30):
        scale = (low + high) / 2
        mean = np.minimum(dice * np.maximum(scale * shape, PHASES + 1) + 1, MAX_TOKENS).mean()
        low, high = (low, scale) if mean > MEAN_TOKENS else (scale, high)
    return np.maximum(scale * shape, PHASES + 1)


def _make_model() -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from asyncrl.data.tiny_model import make_tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=WINDOW_TOKENS,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=END, pad_token_id=0,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # The last norm scales a unit vector to the length sqrt(HIDDEN).
        model.model.embed_tokens.weight.copy_(torch.eye(VOCABULARY, HIDDEN))
        table = torch.from_numpy(np.log(transitions())).float() / HIDDEN**0.5
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :VOCABULARY] = table.T
    model.save_pretrained(MODEL)
    make_tokenizer().save_pretrained(MODEL)
