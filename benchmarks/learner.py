"""Measures trained tokens/s of a learner step on a packed, long-tailed batch."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.frame import Limit, Round, Row
from benchmarks.worker import Worker, answer, instructions

QUICK_GROUPS = 2


def measure(quick: bool) -> Iterator[Round]:
    groups = QUICK_GROUPS if quick else GROUPS
    tokens = float(lengths(groups).sum())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cores = sorted(os.sched_getaffinity(0))
        sides = {
            way: Worker("benchmarks.learner", way, folder / "model", groups, cores=cores, stack=stack) for way in WAYS
        }
        make_model(folder / "model")
        for side in sides.values():
            side.tell("the model is there")
            side.tell("a step to warm up")
        for side in sides.values():
            side.answer()
        while True:
            seconds: dict[str, float] = {}
            for way, side in sides.items():
                side.tell("a step")
                seconds[way] = side.answer()
            ours_s = seconds["ours"]
            yield {
                **{f"of {way}": taken_s / ours_s for way, taken_s in seconds.items() if way != "ours"},
                **{f"{way} tokens/s": tokens / taken_s for way, taken_s in seconds.items()},
            }


ROW = Row(
    what="trained tokens/s of a learner step on a packed, long-tailed batch",
    against="the same model in a padded loop of Hugging Face's",
    limits={"of padded": Limit(2.0)},
    measure=measure,
)


GROUPS, GROUP_SIZE = 16, 8
PROMPT_TOKENS, MEAN_TOKENS, MAX_TOKENS = 32, 64, 256
SIGMA = 1.0
"""Standard deviation of the logarithm of the lengths."""
VOCABULARY, HIDDEN, LAYERS = 2048, 256, 4
ROWS = 16
"""Number of sequences in a padded micro-batch."""
TOKENS_PER_MICROBATCH = ROWS * (PROMPT_TOKENS + MAX_TOKENS)
LR = 1e-5


class Turns:
    """Waits for an instruction before each step and reports its seconds. The process exits at the end of the input."""

    def __init__(self) -> None:
        self._instructions = instructions()

    def wait(self) -> None:
        if next(self._instructions, None) is None:
            raise SystemExit

    def begin(self) -> None:
        self.wait()
        self._started_s = time.perf_counter()

    def end(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        answer(time.perf_counter() - self._started_s)


def make_model(folder: Path) -> None:
    """Writes a random Qwen2 model of about 5 million parameters, and a tokenizer."""
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


def lengths(groups: int) -> np.ndarray:
    """Returns log-normal numbers of completion tokens [groups, group size]."""
    dice = np.random.default_rng(0).normal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, (GROUPS, GROUP_SIZE))
    return np.exp(dice).round().astype(int).clip(1, MAX_TOKENS)[:groups]


def sequences(groups: int) -> list[np.ndarray]:
    """Returns prompt and completion of every trajectory. The trajectories of a group have the same prompt."""
    dice = np.random.default_rng(1)
    prompts = dice.integers(2, VOCABULARY, (groups, PROMPT_TOKENS), dtype=np.int32)
    return [
        np.concatenate([prompt, dice.integers(2, VOCABULARY, length, dtype=np.int32)])
        for prompt, own in zip(prompts, lengths(groups), strict=True)
        for length in own
    ]


def rewards(groups: int) -> np.ndarray:
    return np.random.default_rng(2).random((groups, GROUP_SIZE))


def advantages(groups: int) -> np.ndarray:
    """Returns the GRPO advantages [trajectories]."""
    values = rewards(groups)
    return ((values - values.mean(1, keepdims=True)) / (values.std(1, ddof=1, keepdims=True) + 1e-6)).ravel()


def ours(model: str, groups: int, turns: Turns) -> None:
    from asyncrl.config.config import Config
    from asyncrl.launch.machine import find_port
    from asyncrl.learner.algorithm import make_algorithm
    from asyncrl.learner.batch import make_batch
    from asyncrl.learner.distributed import process_group
    from asyncrl.learner.step import Trainer
    from asyncrl.types import NO_VERSION, Group, Trajectory
    from asyncrl.wire.endpoints import Endpoints

    turns.wait()
    values: dict[str, Any] = {
        "model": {"path": model}, "data": {"train": "none"}, "generator": {"group_size": GROUP_SIZE},
        "replay": {"groups_per_step": groups},
        "learner": {"lr": LR, "tokens_per_microbatch": TOKENS_PER_MICROBATCH},
    }  # fmt: skip
    config = Config.model_validate(values)
    endpoints = Endpoints("bench", "", "", learners=f"tcp://127.0.0.1:{find_port()}")
    all_tokens, all_rewards = iter(sequences(groups)), rewards(groups)

    def trajectory(reward: float) -> Trajectory:
        tokens = next(all_tokens)
        mask = np.arange(len(tokens)) >= PROMPT_TOKENS
        logprobs = np.where(mask, -np.log(VOCABULARY), 0.0).astype(np.float32)
        versions = np.where(mask, 0, NO_VERSION).astype(np.int32)
        return Trajectory(tokens, mask, logprobs, versions, "completed", reward)

    finished = [
        Group(number, 0, 0, number, "bench", 0, 0, [trajectory(float(reward)) for reward in all_rewards[number]])
        for number in range(groups)
    ]
    with process_group(endpoints, 0, 1, start_timeout_s=60, timeout_s=60) as ranks:
        trainer = Trainer(config, ranks, make_algorithm(config))
        while True:
            turns.begin()
            trainer.train(make_batch(finished, tokens_per_microbatch=TOKENS_PER_MICROBATCH), step=1)
            turns.end()


def padded(model: str, groups: int, turns: Turns) -> None:
    """Runs a loop that pads every micro-batch to its longest sequence. The sequences are sorted by group."""
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM

    turns.wait()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, fused=True)
    all_tokens = [torch.from_numpy(tokens).long().to(device) for tokens in sequences(groups)]
    scores = torch.from_numpy(advantages(groups)).float().to(device)
    num_tokens = sum(len(tokens) - PROMPT_TOKENS for tokens in all_tokens)
    while True:
        turns.begin()
        for begin in range(0, len(all_tokens), ROWS):
            part = all_tokens[begin : begin + ROWS]
            ids = pad_sequence(part, batch_first=True)
            attention = pad_sequence([torch.ones_like(tokens) for tokens in part], batch_first=True)
            completions, mask = ids[:, PROMPT_TOKENS:], attention[:, PROMPT_TOKENS:]
            logits = policy(
                input_ids=ids, attention_mask=attention, use_cache=False, logits_to_keep=completions.shape[1] + 1
            ).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, completions.unsqueeze(-1)).squeeze(-1)
            ratio = (logprobs - logprobs.detach()).exp()
            advantage = scores[begin : begin + ROWS].unsqueeze(1)
            loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            ((loss * mask).sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        turns.end()


WAYS = {"ours": ours, "padded": padded}

if __name__ == "__main__":
    WAYS[sys.argv[1]](sys.argv[2], int(sys.argv[3]), Turns())
