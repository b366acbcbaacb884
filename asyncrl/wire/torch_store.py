"""A store as torch's process groups take it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch._C import _distributed_c10d as c10d

from asyncrl.wire.store import Store


class TorchStore(c10d.Store):
    """Keep it for as long as a process group that was made with it: torch only holds the C++ part of the object."""

    def __init__(self, store: Store, prefix: str, timeout_s: float) -> None:
        """All keys begin with `prefix`; `timeout_s` is the deadline of waits that come without one."""
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        return self._store.wait([self._prefix + key], self._timeout_s)[0]

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._prefix + key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._store.peek([self._prefix + key for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        self._store.wait([self._prefix + key for key in keys], seconds)

    def delete_key(self, key: str) -> bool:
        return self._store.delete(self._prefix + key)

    def clone(self) -> TorchStore:
        """The store itself, which is for all threads; those of NCCL ask for a copy."""
        return self
