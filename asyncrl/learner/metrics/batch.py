"""Metrics of what a step trains: rewards, lengths and advantages over the batches of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.learner.batch import Batch
from asyncrl.learner.distributed import Ranks


def batch_metrics(batch: Batch, advantages: Tensor, ranks: Ranks) -> dict[str, float]:
    """Mean, standard deviation, minimum and maximum of each quantity: of the trajectories, and of the action tokens'
    advantages [N]. A collective: all ranks call it."""
    columns = {
        "reward": batch.rewards,
        "prompt_tokens": batch.prompt_tokens,
        "completion_tokens": batch.lengths,
        "advantage": advantages,
    }
    tables = ranks.gather(torch.stack([_moments(values.double()) for values in columns.values()]))
    metrics: dict[str, float] = {}
    for number, name in enumerate(columns):
        count, total, squares = tables[:, number, :3].sum(dim=0).tolist()
        if not count:
            continue
        mean = total / count
        metrics |= {
            f"batch/{name}_mean": mean,
            f"batch/{name}_std": max(squares / count - mean**2, 0.0) ** 0.5,
            f"batch/{name}_min": float(tables[:, number, 3].min()),
            f"batch/{name}_max": float(tables[:, number, 4].max()),
        }
    return metrics


def _moments(values: Tensor) -> Tensor:
    """[count, sum, sum of squares, minimum, maximum] of the finite values, float64."""
    values = values[values.isfinite()]
    if not len(values):
        return torch.tensor([0.0, 0.0, 0.0, torch.inf, -torch.inf], dtype=torch.float64)
    count = torch.tensor(float(len(values)), dtype=torch.float64)
    return torch.stack([count, values.sum(), values.square().sum(), values.min(), values.max()])
