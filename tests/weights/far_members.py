"""Five hosts on one bridge, with a sender of weights on the first and a receiver on each of the others.

    unshare -Urnmp --mount-proc --fork --kill-child python far_members.py TRANSPORT ...

Each host is a network namespace with a name of its own, and its link carries 400 Mb/s each way. The sender prints a
line of JSON: by transport the name of the one used, and the seconds until all receivers had each version of 64 MB.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch
from weight_parts import joined, manifest_of, next_staged

from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.sender import WeightSender
from tests.helpers.forked_scripts import print_json

MEMBERS = 5
VERSIONS = 3
NUM_BYTES = 64_000_000
SHAPE = "tbf rate 400mbit burst 256kb latency 50ms"
TIMEOUT_S = 30.0


def build(transports: list[str]) -> int:
    """Makes the hosts, each with its member. Returns the exit status of the sender."""
    sh("ip link set lo up && ip link add hosts type bridge && ip link set hosts up")
    own = os.readlink("/proc/self/ns/net")
    start = 'hostname "host-$1" && ip link set lo up && read go && exec "$PYTHON" far_members.py "$@"'
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "PYTHON": sys.executable}
    members: list[subprocess.Popen[bytes]] = []
    for rank in range(MEMBERS):
        command = ["unshare", "-nu", "sh", "-c", start, "sh", str(rank), *transports]
        member = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, cwd=os.path.dirname(__file__))
        members.append(member)
        while os.readlink(f"/proc/{member.pid}/ns/net") == own:
            time.sleep(0.01)
        sh(f"ip link add link-{rank} type veth peer name eth0 netns {member.pid}")
        sh(f"ip link set link-{rank} master hosts up && tc qdisc add dev link-{rank} root {SHAPE}")
        inside = f"ip addr add {host(rank)}/24 dev eth0 && ip link set eth0 up && tc qdisc add dev eth0 root {SHAPE}"
        sh(f"nsenter -t {member.pid} -n sh -c '{inside}'")
    for member in members:
        assert member.stdin is not None
        member.stdin.write(b"go\n")
        member.stdin.flush()
    return members[0].wait()


def sh(script: str) -> None:
    """Runs a script of the shell, which has to succeed."""
    subprocess.run(["sh", "-ec", script], check=True, timeout=10.0)


def host(rank: int) -> str:
    """The address of a member's host."""
    return f"10.9.8.{rank + 1}"


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    """NUM_BYTES that depend on the version."""
    return [("weight", torch.arange(NUM_BYTES // 4, dtype=torch.int32) + version)]


def send(transports: list[str]) -> None:
    """Sends the versions by each of the transports in turn."""
    found: dict[str, dict[str, object]] = {}
    for number, transport in enumerate(transports):
        address = f"tcp://{host(0)}:{5001 + number}"
        options = {"transport": transport, "expected_generators": MEMBERS - 1, "timeout_s": TIMEOUT_S}
        sender = joined(WeightSender(address, manifest_of(weights(0)), **options), MEMBERS - 1, up=True)  # type: ignore
        seconds: list[float] = []
        for version in range(VERSIONS):
            sent, started_s = weights(version), time.monotonic()
            sender.send(version, sent)
            sender.wait()
            seconds.append(time.monotonic() - started_s)
        used, stats = sender._delivery.transport, sender.stats  # type: ignore[union-attr]
        assert (stats.count, stats.dropped, sender._delivery.group_number) == (VERSIONS, 0, 1)  # type: ignore
        sender.close()
        found[transport] = {"used": used, "seconds": seconds}
    print_json(found)


def receive(rank: int, transports: list[str]) -> None:
    """Loads every version."""
    for number, transport in enumerate(transports):
        address = f"tcp://{host(0)}:{5001 + number}"
        receiver = WeightReceiver(address, rank=rank, transport=transport, timeout_s=TIMEOUT_S, max_bytes=2 * NUM_BYTES)
        receiver.start()
        receiver.engine_is_up()
        for version in range(VERSIONS):
            staged = next_staged(receiver)
            assert staged.version == version and torch.equal(staged.tensors[0][1], weights(version)[0][1])
            receiver.loaded(staged)
        receiver.close()


if __name__ == "__main__":
    if not sys.argv[1].isdigit():
        sys.exit(build(sys.argv[1:]))
    elif sys.argv[1] == "0":
        send(sys.argv[2:])
    else:
        receive(int(sys.argv[1]), sys.argv[2:])
