"""The addresses of a run's parts; imports nothing, as reward workers have to stay small."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the parts of a run find one another. ZeroMQ addresses are unix sockets in `folder` on one machine."""

    run_id: str
    """Only the parts of the run know it: a message without it comes from a stranger."""
    replay: str
    """ZeroMQ address of the replay queue."""
    weights: str
    """ZeroMQ address of the key-value store that learner rank 0 serves for weight synchronization."""
    learners: str
    """ZeroMQ address of the store where the learner ranks find one another; rank 0 serves it."""
    host: str = "127.0.0.1"
    """Address that gloo and NCCL listen on, as does ZeroMQ unless it has unix sockets."""
    reward_model: str = ""
    """ZeroMQ address of the process that holds the reward model; empty when there is none."""
    critics: tuple[str, ...] = ()
    """ZeroMQ address of each critic rank with a process of its own."""
    critic_ranks: str = ""
    """ZeroMQ address of the store where the critic ranks find one another."""
    folder: str = ""
    """Folder of the run's unix sockets, which only its owner can enter; empty when the run listens on ports."""
    keys: str = ""
    """File with the run's CURVE keys, readable by its owner only; empty when nothing is encrypted."""
