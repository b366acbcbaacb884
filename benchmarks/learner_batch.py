"""One long-tailed batch, and three ways to train on it: ours, a padded loop of Hugging Face's, and TRL's trainer.

Each runs in a process of its own on one core, `python -m benchmarks.learner_batch WAY MODEL STEPS`, and prints the
median seconds of a step. Model, optimizer, tokens and loss (clipped importance ratio, one update) are the same.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

GROUPS, GROUP_SIZE = 16, 8
PROMPT_TOKENS, MEAN_TOKENS, MAX_TOKENS = 32, 64, 256
SIGMA = 1.0
"""Of the logarithm of the lengths."""
VOCABULARY, HIDDEN, LAYERS = 2048, 256, 4
ROWS = 16
"""Sequences of a padded micro-batch."""
LR = 1e-5
WARM_STEPS = 1


def make_model(folder: Path) -> Path:
    """A random Qwen2 of some 5 million parameters, and a tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    tokenizer.save_pretrained(folder)
    return folder


def lengths() -> np.ndarray:
    """Completion tokens [groups, group size], log-normal."""
    dice = np.random.default_rng(0).normal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, (GROUPS, GROUP_SIZE))
    return np.exp(dice).round().astype(int).clip(1, MAX_TOKENS)


def sequences() -> list[np.ndarray]:
    """Prompt and completion of every trajectory."""
    dice = np.random.default_rng(1)
    return [dice.integers(2, VOCABULARY, PROMPT_TOKENS + length, dtype=np.int32) for length in lengths().ravel()]


def rewards() -> np.ndarray:
    return np.random.default_rng(2).random((GROUPS, GROUP_SIZE))


def advantages() -> np.ndarray:
    """[trajectories], of GRPO."""
    values = rewards()
    return ((values - values.mean(1, keepdims=True)) / (values.std(1, ddof=1, keepdims=True) + 1e-6)).ravel()


def ours(model: str, steps: int) -> list[float]:
    """Seconds of each step."""
    from asyncrl.config import Config
    from asyncrl.launch.resources import reserve_ports
    from asyncrl.learner.algorithm import make_algorithm
    from asyncrl.learner.batch import make_batch
    from asyncrl.learner.distributed import connected
    from asyncrl.learner.trainer import Trainer
    from asyncrl.types import NO_VERSION, Endpoints, Group, Trajectory

    values: dict[str, Any] = {
        "model": {"path": model}, "data": {"train": "none"}, "generator": {"group_size": GROUP_SIZE},
        "replay": {"groups_per_step": GROUPS}, "learner": {"lr": LR, "tokens_per_microbatch": 4096},
    }  # fmt: skip
    config = Config.model_validate(values)
    port, other = reserve_ports(0, 2)
    endpoints = Endpoints("bench", "", ("127.0.0.1", other), ("127.0.0.1", port))
    all_tokens, all_rewards = iter(sequences()), rewards()

    def trajectory(reward: float) -> Trajectory:
        tokens = next(all_tokens)
        mask = np.arange(len(tokens)) >= PROMPT_TOKENS
        logprobs = np.where(mask, -np.log(VOCABULARY), 0.0).astype(np.float32)
        versions = np.where(mask, 0, NO_VERSION).astype(np.int32)
        return Trajectory(tokens, mask, logprobs, versions, "completed", reward)

    groups = [
        Group(number, 0, 0, number, "bench", 0, 0, [trajectory(float(reward)) for reward in all_rewards[number]])
        for number in range(GROUPS)
    ]
    seconds: list[float] = []
    with connected(endpoints, 0, 1, start_timeout_s=60, timeout_s=60) as ranks:
        trainer = Trainer(config, ranks, make_algorithm(config))
        for _ in range(WARM_STEPS + steps):
            started_s = time.perf_counter()
            batch = make_batch(groups, tokens_per_microbatch=config.learner.tokens_per_microbatch)
            trainer.train(batch, step=1)
            seconds.append(time.perf_counter() - started_s)
    return seconds


def padded(model: str, steps: int) -> list[float]:
    """Seconds of each step of a loop that pads every micro-batch to its longest sequence."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR)
    all_tokens = [torch.from_numpy(tokens).long() for tokens in sequences()]
    scores = torch.from_numpy(advantages()).float()
    num_tokens = sum(len(tokens) - PROMPT_TOKENS for tokens in all_tokens)
    seconds: list[float] = []
    for _ in range(WARM_STEPS + steps):
        started_s = time.perf_counter()
        for begin in range(0, len(all_tokens), ROWS):
            part = all_tokens[begin : begin + ROWS]
            ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
            attention = torch.nn.utils.rnn.pad_sequence([torch.ones_like(tokens) for tokens in part], batch_first=True)
            logits = policy(input_ids=ids, attention_mask=attention).logits[:, PROMPT_TOKENS - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, PROMPT_TOKENS:].unsqueeze(-1)).squeeze(-1)
            ratio = (logprobs - logprobs.detach()).exp()
            advantage = scores[begin : begin + ROWS].unsqueeze(1)
            loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            ((loss * attention[:, PROMPT_TOKENS:]).sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started_s)
    return seconds


def trl(model: str, steps: int) -> list[float]:
    """Seconds of each step of TRL's GRPOTrainer, which is given the completions and advantages instead of making
    them."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    all_tokens = [torch.from_numpy(tokens).long() for tokens in sequences()]
    completions = [tokens[PROMPT_TOKENS:] for tokens in all_tokens]
    pad = torch.nn.utils.rnn.pad_sequence
    prompt_ids = torch.stack([tokens[:PROMPT_TOKENS] for tokens in all_tokens])
    prepared = {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": pad(completions, batch_first=True),
        "completion_mask": pad([torch.ones_like(one) for one in completions], batch_first=True),
        "advantages": torch.from_numpy(advantages()).float(),
        "num_items_in_batch": torch.tensor(sum(map(len, completions))),
    }
    moments: list[float] = []

    class Given(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return dict(prepared)

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            moments.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            moments.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, use_cpu=not torch.cuda.is_available(), max_steps=WARM_STEPS + steps, learning_rate=LR,
            per_device_train_batch_size=ROWS, gradient_accumulation_steps=GROUPS * GROUP_SIZE // ROWS,
            num_generations=GROUP_SIZE, max_completion_length=MAX_TOKENS, beta=0.0, bf16=False, report_to=[],
            gradient_checkpointing=False, save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Given(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["w2"] * GROUPS * 8}),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[Clock()],
        )
        trainer.train()
    return [end - begin for begin, end in zip(moments[::2], moments[1::2], strict=True)]


WAYS = {"ours": ours, "padded": padded, "trl": trl}

if __name__ == "__main__":
    measured = WAYS[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
    print(statistics.median(measured[WARM_STEPS:]))
