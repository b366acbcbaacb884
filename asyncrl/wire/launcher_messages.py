"""The messages of the launcher, and of commands on a run, to the replay queue, and their answers.

Each body says who sends it and how it is answered; `kinds` has the tables.
"""

from __future__ import annotations

from typing import Literal

from asyncrl.wire.bounds import Body, Index, Number, Text


class Lost(Body):
    """Sent by the launcher when the process of a generator has ended; answered by `Ok`."""

    generator: Index


class Scale(Body):
    """Sent by `asyncrl scale` to set the number of generators; answered by `Ok`."""

    generators: Index


class Memory(Body):
    """Sent by the reward model every few seconds; answered by `Ok`."""

    role: Literal["reward_model"]
    peak_memory_bytes: Number
    """As `asyncrl.util.memory` measures it."""


class ReadStatus(Body):
    """Sent by the launcher for the state of the run; answered by `Ok` with it."""


class ReadSummary(Body):
    """Sent by the launcher for the queue's part of the run's summary; answered by `Ok` with it."""


class Stop(Body):
    """Sent by the launcher to end the run early; answered by `Ok`."""

    reason: Text


class Shutdown(Body):
    """Sent by the launcher to end the replay process; answered by `Ok`."""
