"""The addresses of a run's processes; imports nothing, since reward workers have to stay small."""

from __future__ import annotations

from dataclasses import dataclass, field

LOOPBACK = "127.0.0.1"
NAMED = "run:"
"""Begins the name of an address that the replay queue knows."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of a run's processes. On one machine the ZeroMQ addresses are unix sockets in `folder`. Otherwise
    all but the replay queue's are names, `run:weights`, whose addresses the queue knows (`wire/rpc.py`)."""

    run_id: str
    """Known to the run's processes only: a message without it comes from outside the run."""
    replay: str
    """ZeroMQ address of the replay queue."""
    weights: str
    """ZeroMQ address of the channel on which learner rank 0 announces weights; with the transport files, of the store
    through which the other ranks have its orders."""
    learners: str
    """ZeroMQ address of the store through which the learner ranks rendezvous; rank 0 serves it."""
    host: str = LOOPBACK
    """Address of the role's own host: gloo and NCCL listen there, and ZeroMQ unless it uses unix sockets."""
    reward_model: str = ""
    """ZeroMQ address of the reward model's process; empty without a reward model."""
    critics: tuple[str, ...] = ()
    """ZeroMQ address of each critic rank that has a separate process."""
    critic_ranks: str = ""
    """ZeroMQ address of the store through which the critic ranks rendezvous."""
    epoch: int = 0
    """Number of earlier starts of the learner and critic ranks in this launch, in their own endpoints. Messages of a
    lower epoch than the newest are refused: they come from a process that was given up and is still alive."""
    folder: str = ""
    """Folder of the run's unix sockets, which only its owner can enter; empty when the run listens on ports."""
    keys: str = field(default="", repr=False)
    """The run's CURVE keys as JSON text (`wire/sockets.py`), a secret; empty when nothing is encrypted."""

    @property
    def announces(self) -> bool:
        """True if the servers other than the replay queue announce their addresses."""
        return self.weights.startswith(NAMED)

    def listening(self, address: str) -> str:
        """Returns the ZeroMQ address to listen on for a server of these endpoints: for a name, a port of the role's own
        host that the system chooses."""
        return f"tcp://{self.host}:*" if address.startswith(NAMED) else address
