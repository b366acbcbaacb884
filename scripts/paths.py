"""Counts what a reader meets on the path of a group: functions, files, and types that carry the group.

    python -m scripts.paths [--list]

Path A: a generator's client asks for two groups and sends them, a learner's client takes the batch and commits the
step. The replay queue runs in another thread, over loopback, with a journal. Only code of the package is counted, from
the first ask to the answer to the commit.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import asyncrl
from asyncrl.launch.machine import find_port
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.client import GeneratorClient, LearnerClient
from asyncrl.replay.journal import Journal
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.server import run_replay
from asyncrl.wire.messages import GeneratorStats
from tests.helpers.replay import EndlessPrompts, loopback_endpoints, make_group, small_config

PACKAGE = Path(asyncrl.__file__).parent
CARRIES = {"ticket", "tickets", "shards", "trajectories", "leases", "groups", "holders", "behavior_logprobs", "prompt"}
"""Attributes of which a type that carries a group, its lease or its trajectories has one."""

COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>"}
"""Code that counts as a part of the function around it."""


class PathProfile:
    """The functions of the package that were called in any thread, and the types of what they were given."""

    def __init__(self) -> None:
        self.functions: dict[str, set[str]] = defaultdict(set)
        """By file."""
        self.types: set[str] = set()

    def start(self) -> None:
        """Profiles this thread and the threads that start from now on."""
        threading.setprofile(self._call)
        sys.setprofile(self._call)

    def stop(self) -> None:
        """Ends the profile of this thread and of new ones."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _call(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(PACKAGE)):
            return
        if code.co_name in COMPREHENSIONS:
            return
        self.functions[str(Path(code.co_filename).relative_to(PACKAGE))].add(code.co_qualname)
        values = frame.f_locals.values() if event == "call" else [value]
        self.types.update(kind.__name__ for kind in map(type, values) if _carries(kind))


def _carries(kind: type) -> bool:
    return kind.__module__.startswith("asyncrl.") and not CARRIES.isdisjoint(_fields(kind))


def _fields(kind: type) -> set[str]:
    return {name for base in kind.__mro__ for name in getattr(base, "__annotations__", ())}


def profile_step(folder: Path) -> PathProfile:
    """Path A with a journal in the folder."""
    profile = PathProfile()
    journal = Journal(folder / "journal", flush="group")
    queue = ReplayQueue(small_config(), EndlessPrompts(), TraceWriter(folder / "trace.parquet"), journal=journal)
    endpoints, stop = loopback_endpoints(find_port()), threading.Event()
    generator, learner = GeneratorClient(endpoints, 0), LearnerClient(endpoints, 0)
    server = threading.Thread(target=run_replay, args=(queue, endpoints, stop.is_set))
    profile.start()
    server.start()
    try:
        generator.ask(0, 2, GeneratorStats.of())
        while (reply := generator.poll(0.1)) is None:
            pass
        for lease in reply.leases:
            generator.finish(make_group(lease, 0))
        shard = learner.take(1)
        assert shard is not None and len(shard.groups) == 2
        learner.commit(1, {})
    finally:
        profile.stop()
        stop.set()
        server.join()
        generator.close()
        learner.close()
    return profile


def main() -> None:
    """Prints the counts of path A; with `--list` what is counted as well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the functions by file, and the types")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        profile = profile_step(Path(folder))
    if arguments.list:
        for file, functions in sorted(profile.functions.items()):
            print(f"{file}: {', '.join(sorted(functions))}")
        print(f"types: {', '.join(sorted(profile.types))}")
    functions = sum(map(len, profile.functions.values()))
    print(f"path A: {functions} functions in {len(profile.functions)} files, {len(profile.types)} types")


if __name__ == "__main__":
    main()
