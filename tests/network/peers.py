"""The ends of the wire on hosts: `python -m tests.network.peers serve FILE ADDRESS ADDRESS ADDRESS`,
`... ask FILE ADDRESS CONNECTIONS BYTES` and `... intrude FILE ADDRESS...`. FILE has the
keys. They print lines of JSON."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import Message, encode
from asyncrl.wire.rpc import ChannelServer, Connection, Reply, Server
from asyncrl.wire.service_messages import Join, ReceiverMessage, StoreRequest, Train, Trained
from asyncrl.wire.sockets import connect_dealer
from asyncrl.wire.store import StoreServer

RUN_ID = "network"
RESEND_S, TIMEOUT_S, PAUSE_S, SAY_S = 2.0, 120.0, 0.05, 0.5


def endpoints(keys: str, address: str) -> Endpoints:
    return Endpoints(RUN_ID, address, "", "", keys=keys)


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")  # in one piece, whichever thread it is
    sys.stdout.flush()


def serve(keys: str, requests: str, channel: str, store: str) -> None:
    """Answers requests with the number of bytes that came, tenths of a second after they came first, as many as their
    `step`. Also listens as a channel and a store. Often prints what each has counted."""
    due_s: dict[tuple[bytes, int], float] = {}
    waiting: dict[tuple[bytes, int], Reply] = {}

    def answer(message: Message) -> Reply | None:
        key, now_s = (message.peer, message.seq), time.monotonic()
        reply = Reply(Trained({"bytes": sum(array.nbytes for array in message.arrays)}))
        if now_s >= due_s.setdefault(key, now_s + message.body.step / 10):
            return reply
        waiting[key] = reply
        return None

    server = Server(endpoints(keys, requests), requests, "server", {Train: answer})
    channels = [ChannelServer(channel, "channel", [ReceiverMessage], run_id=RUN_ID, keys=keys)]
    channels[0].start(lambda peer, body: say(taken=type(body).__name__))
    channels.append(StoreServer(store, "store", run_id=RUN_ID, keys=keys).channel)
    routers = [server, *channels]
    said_s = 0.0
    while True:
        if server.poll(0.02):
            while server.handle_next() is not None:
                pass
        now_s = time.monotonic()
        for key in [key for key in waiting if due_s[key] <= now_s]:
            server.send(*key, waiting.pop(key))
        if now_s - said_s > SAY_S:
            said_s = now_s
            bad = sum(router.errors.total() for router in routers)
            say(strangers=[router.num_rejected for router in routers], bad=bad)


def ask(keys: str, address: str, connections: int, num_bytes: int) -> None:
    """Asks on each connection, one request after another, some of which take long. Says when each was asked and when
    it was answered."""

    def go(number: int) -> None:
        connection, arrays = Connection(endpoints(keys, address), resend_s=RESEND_S), [np.ones(num_bytes // 4, "f4")]
        connection.request(Train(number, 0), timeout_s=TIMEOUT_S)
        say(connection=number, up=True)
        while True:
            asked_s = time.monotonic()
            answer = connection.request(Train(number, number), arrays, timeout_s=TIMEOUT_S)
            assert answer.body.metrics == {"bytes": num_bytes}, answer
            say(connection=number, asked_s=asked_s, answered_s=time.monotonic())
            time.sleep(PAUSE_S)

    for number in range(connections):
        threading.Thread(target=go, args=(number,)).start()


def intrude(keys: str, *addresses: str) -> None:
    """Knocks at each address, as one who knows the run's id but not its keys. Prints the replies."""
    greeted, answers = 0, 0
    for address in addresses:
        for opening in (b"GET / HTTP/1.0\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03" + bytes(200), b""):
            greeted = max(greeted, _shout(address, opening))
        for own in ("", keys):
            dealer = connect_dealer(address, keys=own, linger_s=0.0)
            for body in (Train(0, 0), Join(1, "cpu", "stranger"), StoreRequest(1, "get", ["x"], b"", 0)):
                with suppress(zmq.Again):
                    dealer.send_multipart(encode(RUN_ID, body), zmq.DONTWAIT)
            answers += bool(dealer.poll(1000))
            dealer.close()
    say(greeted=greeted, answers=answers)


def _shout(address: str, opening: bytes) -> int:
    """Sends bytes. Returns how many come back until the other side hangs up, or for a while."""
    host, _, port = address.removeprefix("tcp://").partition(":")
    got = 0
    with socket.create_connection((host, int(port)), timeout=1.0) as caller, suppress(OSError):
        caller.sendall(opening)
        while more := caller.recv(1 << 16):
            got += len(more)
    return got


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", file, *addresses]:
            serve(Path(file).read_text(), *addresses)
        case ["ask", file, address, number, size]:
            ask(Path(file).read_text(), address, int(number), int(size))
        case ["intrude", file, *addresses]:
            intrude(Path(file).read_text(), *addresses)
