"""Measures advantages and losses on 1 M action tokens against a plain elementwise pass of the same size.

The plain pass is (a * b + c).exp() on as many float32 numbers, forward and backward; the two run alternately on one
thread. Losses, including the critic's, run forward and backward; advantages run forward only. `mixed` batches have
sequences of 1k to 8k tokens, `short` batches of 3 tokens.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.algorithms.advantages import ADVANTAGES, whiten
from asyncrl.algorithms.losses import LOSSES, aggregate, m2po_bound, value_loss

NUM_TOKENS = 1_000_000
GROUP_SIZE = 8


def lengths_of(mix: str, generator: torch.Generator) -> Tensor:
    """Returns the number of tokens of each sequence, about NUM_TOKENS in total."""
    if mix == "short":
        return torch.full((NUM_TOKENS // 3,), 3)
    drawn = torch.randint(1024, 8193, (NUM_TOKENS // 1024,), generator=generator)
    return drawn[drawn.cumsum(0) <= NUM_TOKENS]


def columns_of(mix: str) -> dict[str, Tensor]:
    """Returns all possible inputs of a loss or an advantage: per token, and under separate keys per sequence."""
    generator = torch.Generator().manual_seed(0)
    lengths = lengths_of(mix, generator)
    seq = torch.arange(len(lengths)).repeat_interleave(lengths)
    behavior = -torch.rand(len(seq), generator=generator)
    near = [behavior + 0.1 * torch.randn(len(seq), generator=generator) for _ in range(2)]
    values, rewards, returns = (torch.randn(len(seq), generator=generator) for _ in range(3))
    return {
        "seq": seq,
        "lengths": lengths,
        "group": torch.arange(len(lengths)) // GROUP_SIZE,
        "logprobs": near[0].requires_grad_(),
        "proximal_logprobs": near[1],
        "behavior_logprobs": behavior,
        "old_logprobs": behavior,
        "advantages": torch.randn(len(seq), generator=generator),
        "log_ratios": near[1] - behavior,
        "values": values,
        "rewards": rewards,
        "returns": returns,
        "sequence_rewards": torch.randn(len(lengths), generator=generator),
        "greedy_rewards": torch.randn(len(lengths), generator=generator),
    }


def names_of(function: Callable[..., object]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]


def passes(columns: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """Returns the timed functions by name."""

    def advantage(function: Callable[..., object]) -> Callable[[], object]:
        names = names_of(function)
        rewards = columns["sequence_rewards" if {"group", "greedy_rewards"} & set(names) else "rewards"]
        inputs = [(columns | {"rewards": rewards})[name] for name in names]
        return lambda: function(*inputs)

    def loss(function: Callable[..., Tensor]) -> Callable[[], object]:
        inputs = [columns[name] for name in names_of(function)]
        return lambda: aggregate(function(*inputs), columns["seq"]).backward()

    values = columns["values"].clone().requires_grad_()
    result = {f"advantage {name}": advantage(function) for name, function in ADVANTAGES.items()}
    result["advantage whiten"] = lambda: whiten(columns["rewards"])
    result |= {f"loss {name}": loss(function) for name, function in LOSSES.items()}
    result["m2po_bound"] = lambda: m2po_bound(columns["log_ratios"], columns["advantages"])
    result["value_loss"] = lambda: value_loss(values, columns["values"], columns["returns"]).sum().backward()
    return result


def plain_pass(size: int) -> Callable[[], object]:
    a, b, c = torch.rand(3, size).unbind()
    a.requires_grad_()
    return lambda: (a * b + c).exp().sum().backward()


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table: dict[str, dict[str, float]] = {}
    for mix in ("mixed", "short"):
        columns = columns_of(mix)
        plain = plain_pass(len(columns["seq"]))
        plain()
        for name, call in passes(columns).items():
            call()
            ratios = [seconds(call) / seconds(plain) for _ in range(options.rounds)]
            table.setdefault(name, {})[mix] = statistics.median(ratios)
    print(f"{'times the plain pass':40} {'mixed':>7} {'short':>7}")
    for name, row in table.items():
        print(f"{name:40} {row['mixed']:7.2f} {row['short']:7.2f}")
    if options.json:
        options.json.write_text(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
