"""Real clients of a replay queue in a separate process: `python -m tests.fuzz.client_process PORT`.

Writes a line of sums ten times a second, so that a client that hangs is seen.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import structlog

from asyncrl.errors import InvariantError, PeerTimeoutError, ProtocolError, RunError
from asyncrl.replay.client import GeneratorClient, LearnerClient
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.messages import GeneratorStats
from tests.fuzz.frames import GROUP_SIZE, RUN_ID
from tests.helpers.replay import loopback_endpoints, make_group

TIMEOUT_S = 2.0
EXPECTED = (ProtocolError, RunError, PeerTimeoutError)
"""Errors that a client may raise for a wrong answer; its role then ends with a clear text."""


def generator_turns(endpoints: Endpoints, outcomes: Counter[str]) -> Callable[[], None]:
    client = GeneratorClient(endpoints, 0, timeout_s=TIMEOUT_S)

    def turn() -> None:
        client.ask(0, 2, GeneratorStats.of())
        reply = client.poll(0.02)
        if reply is None:
            return
        outcomes["leases"] += 1
        for lease in reply.leases[:GROUP_SIZE]:
            client.finish(make_group(lease, 0))

    return turn


def learner_turns(endpoints: Endpoints, outcomes: Counter[str]) -> Callable[[], None]:
    client = LearnerClient(endpoints, 0, timeout_s=TIMEOUT_S)

    def turn() -> None:
        shard = client.take(1)
        outcomes["stop" if shard is None else "shard"] += 1
        client.commit(1, {"learner/loss": 1.0})
        outcomes["committed"] += 1
        next(client.evaluations(lambda: False), None)
        outcomes["evaluation"] += 1

    return turn


def play(turn: Callable[[], None], beats: list[float], index: int, outcomes: Counter[str], crash: list[str]) -> None:
    while not crash:
        try:
            turn()
        except EXPECTED as error:
            if isinstance(error, InvariantError):
                raise
            outcomes[type(error).__name__] += 1
        except BaseException as error:
            import traceback

            crash.append("".join(traceback.format_exception(error)))
            return
        beats[index] = time.monotonic()


def main(port: int) -> int:
    faulthandler.register(signal.SIGUSR1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    endpoints = loopback_endpoints(port, RUN_ID)
    outcomes: Counter[str] = Counter()
    crash: list[str] = []
    beats = [time.monotonic()] * 2
    for index, make in enumerate((generator_turns, learner_turns)):
        turn = make(endpoints, outcomes)
        threading.Thread(target=play, args=(turn, beats, index, outcomes, crash), daemon=True).start()
    while not crash:
        silent_s = time.monotonic() - min(beats)
        counts = ",".join(f"{name}={count}" for name, count in sorted(outcomes.items()))
        print(f"{silent_s:.1f} {counts}", flush=True)
        time.sleep(0.1)
    print(crash[0], file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
