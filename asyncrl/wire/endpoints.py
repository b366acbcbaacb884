"""The addresses of a run's processes; imports nothing, since reward workers have to stay small."""

from __future__ import annotations

from dataclasses import dataclass, field

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of a run's processes. On one machine the ZeroMQ addresses are unix sockets in `folder`."""

    run_id: str
    """Known to the run's processes only: a message without it comes from outside the run."""
    replay: str
    """ZeroMQ address of the replay queue."""
    weights: str
    """ZeroMQ address of the channel on which learner rank 0 announces weights."""
    learners: str
    """ZeroMQ address of the store through which the learner ranks rendezvous; rank 0 serves it."""
    host: str = LOOPBACK
    """Address that gloo and NCCL listen on, and ZeroMQ unless it uses unix sockets."""
    reward_model: str = ""
    """ZeroMQ address of the reward model's process; empty without a reward model."""
    critics: tuple[str, ...] = ()
    """ZeroMQ address of each critic rank that has a process of its own."""
    critic_ranks: str = ""
    """ZeroMQ address of the store through which the critic ranks rendezvous."""
    folder: str = ""
    """Folder of the run's unix sockets, which only its owner can enter; empty when the run listens on ports."""
    keys: str = field(default="", repr=False)
    """The run's CURVE keys as JSON text (`wire/curve_keys.py`), a secret; empty when nothing is encrypted."""
