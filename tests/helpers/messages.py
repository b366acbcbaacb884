"""Messages as they are on the wire, sound or not."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.wire.frames import SCHEMA


def raw_frames(run_id: str, kind: str, body: Any, *, seq: int = 1) -> list[bytes]:
    """A message without arrays, with any body."""
    header = {"v": SCHEMA, "run": run_id, "kind": kind, "seq": seq, "body": body, "arrays": []}
    return [msgspec.msgpack.encode(header)]
