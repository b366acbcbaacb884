"""Copies the logs of roles on hosts that do not share the run folder to the run folder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from asyncrl.launch.ray.pool_actor import RoleFile
from asyncrl.launch.worker import RoleSpec

log = structlog.get_logger()

EVERY_S = 2.0
MAX_BYTES = 1 << 20
"""Maximum size of a read: a role that writes more is copied later."""
POLL_S = 0.05
FILES: tuple[RoleFile, ...] = ("jsonl", "out")


@dataclass(slots=True, eq=False)
class _Followed:
    actor: Any
    logs: str
    name: str
    file: RoleFile
    offset: int = 0
    size: Any = None
    """The reference of the file's size before the role started: what an earlier run left."""
    read: Any = None


class RemoteLogs:
    """The files of the roles that `follow` was called for, copied to the folder `logs`."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._followed: dict[tuple[Any, str, RoleFile], _Followed] = {}
        self._next_s = 0.0

    def follow(self, actor: Any, spec: RoleSpec) -> None:
        """Copies the files of a role from now on; called before it starts."""
        for file in FILES:
            if (key := (actor, spec.name, file)) not in self._followed:
                size = actor.size.remote(str(spec.logs), spec.name, file)
                self._followed[key] = _Followed(actor, str(spec.logs), spec.name, file, size=size)

    def tick(self) -> None:
        """Asks for what is new every EVERY_S, and writes what has come. Returns at once."""
        ask = time.monotonic() >= self._next_s
        if ask:
            self._next_s = time.monotonic() + EVERY_S
        for one in list(self._followed.values()):
            self._advance(one, ask=ask)

    def drain(self, *, timeout_s: float) -> None:
        """Copies what is left, as far as the actors answer in time."""
        deadline_s = time.monotonic() + timeout_s
        quiet: set[int] = set()
        while len(quiet) < len(self._followed) and time.monotonic() < deadline_s:
            for one in list(self._followed.values()):
                if self._advance(one, ask=True, last=True) == 0:
                    quiet.add(id(one))
            time.sleep(POLL_S)

    def _advance(self, one: _Followed, *, ask: bool, last: bool = False) -> int | None:
        """Returns the number of bytes that were read; None if none came."""
        import ray
        from ray.exceptions import RayError

        try:
            if one.size is not None and ray.wait([one.size], timeout=0)[0]:
                one.offset, one.size = ray.get(one.size), None
            data: bytes | None = None
            if one.read is not None and ray.wait([one.read], timeout=0)[0]:
                data, one.read = bytes(ray.get(one.read)), None
        except RayError as error:
            log.warning("the log of a role is not copied any more", name=one.name, error=type(error).__name__)
            self._followed = {key: other for key, other in self._followed.items() if other is not one}
            return 0
        if data is not None:
            self._append(one, data, last=last)
        if ask and one.size is None and one.read is None:
            one.read = one.actor.read.remote(one.logs, one.name, one.file, one.offset, MAX_BYTES)
        return None if data is None else len(data)

    def _append(self, one: _Followed, data: bytes, *, last: bool) -> None:
        """Appends the complete lines; what has no line end in MAX_BYTES, and the rest at the end, as it is."""
        complete = data[: data.rfind(b"\n") + 1]
        if last or (not complete and len(data) == MAX_BYTES):
            complete = data
        if complete:
            self._logs.mkdir(parents=True, exist_ok=True)
            with (self._logs / f"{one.name}.{one.file}").open("ab") as stream:
                stream.write(complete)
            one.offset += len(complete)
