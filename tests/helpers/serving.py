"""Servers of the package that a test runs in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def serving(serve: Callable[[], None], stop: threading.Event) -> Iterator[None]:
    """`serve` runs in a thread; it must return soon after `stop` is set, which it is at the end."""
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=20)
    assert not thread.is_alive()
