"""Traffic to measure a link by: `python -m tests.network.traffic serve`, `... echo HOST COUNT` or
`... send HOST BYTES`."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

ECHO_PORT, SINK_PORT = 5000, 5001
INTERVAL_S = 0.01
LATE_S = 1.0


def serve() -> None:
    """Returns datagrams to their senders, and a byte for each connection that has sent all of its data."""
    echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    echo.bind(("", ECHO_PORT))
    threading.Thread(target=_echo, args=(echo,), daemon=True).start()
    with socket.create_server(("", SINK_PORT)) as sink:
        print("up", flush=True)
        while True:
            connection, _ = sink.accept()
            with connection:
                while connection.recv(1 << 16):
                    pass
                connection.send(b"!")


def _echo(echo: socket.socket) -> None:
    while True:
        echo.sendto(*echo.recvfrom(1 << 16))


def measure_echoes(host: str, count: int) -> list[float]:
    """Sends datagrams. Returns the round trip of each that came back, in seconds."""
    round_trips_s: list[float] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caller:

        def send() -> None:
            for _ in range(count):
                caller.sendto(str(time.monotonic()).encode(), (host, ECHO_PORT))
                time.sleep(INTERVAL_S)

        sender = threading.Thread(target=send)
        caller.bind(("", 0))
        caller.settimeout(LATE_S)
        sender.start()
        try:
            while len(round_trips_s) < count:
                sent_s = float(caller.recv(100))
                round_trips_s.append(time.monotonic() - sent_s)
        except TimeoutError:
            pass  # the rest is lost
        sender.join()
    return round_trips_s


def measure_sending(host: str, num_bytes: int) -> float:
    """Returns the seconds until the other side has received this many bytes."""
    with socket.create_connection((host, SINK_PORT)) as connection:
        began_s = time.monotonic()
        connection.sendall(bytes(num_bytes))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        return time.monotonic() - began_s


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve"]:
            serve()
        case ["echo", host, number]:
            print(json.dumps(measure_echoes(host, int(number))))
        case ["send", host, number]:
            print(json.dumps(measure_sending(host, int(number))))
