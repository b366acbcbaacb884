"""Messages to the replay queue about the addresses of the run's servers (`directory.py`)."""

from __future__ import annotations

from asyncrl.wire.bounds import Body, Count, Name


class Announce(Body):
    """Sent by a server that listens; answered by `Ok`."""

    name: Name
    address: Name
    """ZeroMQ address."""
    epoch: Count
    """As in the run's endpoints; a lower one than the name's latest is refused."""


class LookUp(Body):
    """Sent by a client that will connect; answered by `Located`."""

    name: Name
    epoch: Count
    """Announcements of earlier epochs do not count."""


class Located(Body):
    """The answer of the queue to `LookUp`."""

    address: Name
    """Empty if no process has announced the name."""
