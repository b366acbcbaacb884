"""Adapts a store to the interface of torch's process groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch._C import _distributed_c10d as c10d

from asyncrl.wire.store import RemoteStore, Store

GROUP_KEYS = "group/"
"""Prefix of the keys of all groups that `group_store` serves."""


class TorchStore(c10d.Store):
    """A torch store backed by one of ours. Keep a reference for the lifetime of each process group created with it:
    torch holds only the C++ part of the object."""

    def __init__(self, store: Store | RemoteStore, prefix: str, timeout_s: float) -> None:
        """All keys start with `prefix`; `timeout_s` is the default deadline of waits."""
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._timeout_s = timeout_s

    def part(self, name: str) -> TorchStore:
        """Returns the part of the store that one of several groups has for itself."""
        return TorchStore(self._store, f"{self._prefix}{name}/", self._timeout_s)

    def set(self, key: str, value: bytes | str) -> None:
        """Sets the value of a key."""
        self._store.ask("set", [self._prefix + key], value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Waits for a key and returns its value."""
        (value,) = self._store.ask("wait", [self._prefix + key], within_s=self._timeout_s).values
        return value or b""

    def add(self, key: str, value: int) -> int:
        """Adds to a counter, which starts at 0, and returns its new value."""
        return self._store.ask("add", [self._prefix + key], amount=value).count

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys are there."""
        return None not in self._store.ask("get", [self._prefix + key for key in keys]).values

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when all keys are there. Raises TimeoutError."""
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        self._store.ask("wait", [self._prefix + key for key in keys], within_s=seconds)

    def delete_key(self, key: str) -> bool:
        """Deletes a key. Returns True if it was there."""
        return bool(self._store.ask("delete", [self._prefix + key]).count)

    def clone(self) -> TorchStore:
        """Returns the store itself, which is thread-safe; the threads of NCCL ask for a copy."""
        return self


def group_store(store: Store | RemoteStore, number: int, timeout_s: float) -> TorchStore:
    """Returns the torch store of the process group of this number; `timeout_s` is the default deadline of waits."""
    return TorchStore(store, f"{GROUP_KEYS}{number}/", timeout_s)
