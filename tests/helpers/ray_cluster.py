"""A Ray cluster of several nodes on this machine, in a separate process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import psutil

STORE_BYTES = 78 << 20
QUICK = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "2",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""A dead node is declared dead within seconds."""


class RayCluster:
    """A head without cores, and nodes with one core each. `close` ends everything."""

    def __init__(self, nodes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.ray_cluster"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **QUICK},
            text=True,
        )
        self._tree: set[int] = set()
        self.address: str = self._ask("start", nodes)

    def add(self) -> int:
        """Adds a node and returns its number."""
        return self._ask("add")

    def remove(self, process: int) -> None:
        """Kills the node of a process without a word to the others. The processes on it end as they do with a
        machine: at once."""
        raylets = [psutil.Process(pid) for pid in self._ask("raylets")]
        node = next(one for one in psutil.Process(process).parents() if one in raylets)
        for one in (node, *node.children(recursive=True)):
            one.kill()

    def close(self) -> None:
        """Ends all processes; raylets outlive the process that started them."""
        self._note()
        for pid in (self._process.pid, *self._tree):
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def _note(self) -> None:
        self._tree |= {child.pid for child in psutil.Process(self._process.pid).children(recursive=True)}

    def _ask(self, *words: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        answer = next(line for line in self._process.stdout if line.startswith("answer "))
        self._note()
        return json.loads(answer.removeprefix("answer "))


def main() -> None:
    """Does what the lines on standard input say."""
    from ray.cluster_utils import Cluster

    cluster, nodes = Cluster(), []

    def add() -> int:
        nodes.append(cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES))
        return len(nodes) - 1

    for line in sys.stdin:
        word, *rest = json.loads(line)
        answer: Any = None
        if word == "start":
            cluster.add_node(num_cpus=0, object_store_memory=STORE_BYTES, include_dashboard=False)
            for _ in range(rest[0]):
                add()
            answer = cluster.address
        elif word == "add":
            answer = add()
        elif word == "raylets":
            answer = [info.process.pid for node in nodes for info in node.all_processes["raylet"]]
        print("answer", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
