"""Addresses of a run's servers on several hosts: each announces its own to the replay queue, where clients look it up.

Only the replay queue's address is known in advance. A server listens on a port that the system chooses, so that it can
start on any host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

from asyncrl.errors import PeerTimeoutError
from asyncrl.wire.directory_messages import Announce, Located, LookUp
from asyncrl.wire.endpoints import NAMED, Endpoints
from asyncrl.wire.rpc import Connection

ANSWER_S = 10.0
"""Deadline of the replay queue's answer, long enough for a restart of its process."""
RESEND_S = 2.0
LOOK_UP_S = 0.2
"""Pause between two look-ups of a server that has not announced itself."""


def announce(endpoints: Endpoints, address: str, bound: str) -> None:
    """Tells the replay queue that the server of this name listens on the ZeroMQ address `bound`; does nothing for an
    address without a name. Raises PeerTimeoutError if the queue does not answer, and RunError if a process of a later
    epoch has the name."""
    if not address.startswith(NAMED):
        return
    with closing(Connection(endpoints, resend_s=RESEND_S)) as queue:
        body = Announce(address.removeprefix(NAMED), bound, endpoints.epoch)
        queue.request(body, timeout_s=ANSWER_S)


def located(
    endpoints: Endpoints,
    address: str,
    *,
    timeout_s: float,
    own_epoch: bool = False,
    check: Callable[[], None] = lambda: None,
) -> str:
    """Returns the ZeroMQ address of a server, once it has announced itself; an address without a name is returned as it
    is. With `own_epoch`, announcements of earlier epochs do not count. `check` is called while waiting and may raise.
    Raises PeerTimeoutError if the server does not announce itself in time."""
    if not address.startswith(NAMED):
        return address
    name, deadline_s = address.removeprefix(NAMED), time.monotonic() + timeout_s
    with closing(Connection(endpoints, resend_s=RESEND_S)) as queue:
        while True:
            check()
            body = LookUp(name, endpoints.epoch if own_epoch else 0)
            found: Located = queue.request(body, timeout_s=ANSWER_S).body
            if found.address:
                return found.address
            if time.monotonic() > deadline_s:
                raise PeerTimeoutError(f"no process listens for {name!r}: none has said so within {timeout_s:g} s")
            time.sleep(LOOK_UP_S)
