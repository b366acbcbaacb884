"""One sound message of every kind, as `encode` gives it; what the fuzzer mutates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrl.replay.codec import pack_group, pack_leases
from asyncrl.types import Lease, Prompt
from asyncrl.wire.frames import Arrays, encode
from tests.helpers.replay import PROMPT_TOKENS, make_group

RUN_ID = "fuzz"
GROUP_SIZE = 2
STATS = {
    "tokens": 12,
    "waiting_s": 0.5,
    "working_s": 1.0,
    "syncing_s": 0.0,
    "writing_s": 0.0,
    "stall_ms": [2.0, 3.5],
    "rewards_failed": 1,
    "costs": [0.01, 1e-4, 2e-3, 0.1],
}
METRICS = {"learner/loss": 0.25, "learner/wait_s": 0.1, "weights/broadcasts": 3.0}


def frames_of(kind: str, body: Any, arrays: Sequence[Arrays] = (), *, seq: int = 1) -> list[bytes]:
    return [bytes(frame) for frame in encode(RUN_ID, kind, body, seq=seq, arrays=arrays)]


def prompt(row: int) -> Prompt:
    chat = [{"role": "user", "content": "1+1="}]
    tokens = np.arange(PROMPT_TOKENS, dtype=np.int32)
    return Prompt(row, tokens, "2", "test", {"index": row, "tags": ["a", None]}, chat, {"level": 1.5})


def finish_frames(ticket: int, attempt: int, row: int, version: int, *, seq: int = 1) -> list[bytes]:
    """As `GeneratorClient` sends it: all arrays in one frame."""
    meta, block = pack_group(make_group(Lease(ticket, attempt, prompt(row)), version))
    return frames_of("finish", meta, [block], seq=seq)


def ask_body(
    generator: int,
    version: int,
    num_groups: int,
    *,
    session: str = "0f" * 16,
    number: int = 1,
    num_evaluations: int = 2,
) -> Any:
    return {
        "generator": generator,
        "session": session,
        "number": number,
        "version": version,
        "num_groups": num_groups,
        "num_evaluations": num_evaluations,
        "stats": STATS,
        "working_on": [
            {"ticket": 0, "attempt": 0, "evaluation": False},
            {"ticket": 1, "attempt": 0, "evaluation": True},
        ],
    }


def evaluated_body(ticket: int, attempt: int, version: int) -> Any:
    return {
        "ticket": ticket,
        "attempt": attempt,
        "version": version,
        "data_source": "test",
        "rewards": [1.0],
        "status": ["completed"],
        "tokens": 3,
    }


def commit_body(step: int) -> Any:
    return {"step": step, "metrics": METRICS, "saving": False, "checkpoints": []}


def take_body(step: int) -> Any:
    return {"rank": 0, "step": step}


def requests(step: int = 0) -> dict[str, list[bytes]]:
    """By kind, what roles ask; `step` steps are committed."""
    release = {
        "generator": 0,
        "leases": [{"ticket": 0, "attempt": 0, "tokens": 3}],
        "evaluations": [{"ticket": 1, "attempt": 0}],
    }
    rows = [np.arange(6, dtype=np.int32), np.array([4, 2], dtype=np.int32), np.array([1, 2, 4], dtype=np.int32)]
    value = {"rank": 0, "step": 1, "minibatches": [1], "names": [[[0, 0], [0, 1]]]}
    return {
        "ask": frames_of("ask", ask_body(1, step, 2)),
        "finish": finish_frames(0, 0, 0, step),
        "evaluated": frames_of("evaluated", evaluated_body(0, 0, step)),
        "release": frames_of("release", release),
        "take": frames_of("take", take_body(step + 1)),
        "begin": frames_of("begin", {"rank": 0, "step": step}),
        "commit": frames_of("commit", commit_body(step + 1)),
        "next_evaluation": frames_of("next_evaluation", {"after": 0}),
        "lost": frames_of("lost", {"generator": 1}),
        "scale": frames_of("scale", {"generators": 2}),
        "status": frames_of("status", {}),
        "summary": frames_of("summary", {}),
        "shutdown": frames_of("shutdown", {}),
        "stop": frames_of("stop", {"text": "enough"}),
        "value": frames_of("value", value, rows),
        "train": frames_of("train", take_body(1), [np.ones(3, dtype=np.float32)]),
        "save": frames_of("save", {"rank": 0, "step": 1, "what": "model"}),
        "restore": frames_of("restore", {"rank": 0, "step": 1}),
        "leave": frames_of("leave", {"rank": 0}),
    }


def answers(seq: int = 1, *, ticket: int = 0, attempt: int = 0, step: int = 1) -> dict[str, list[bytes]]:
    """By kind, what roles are answered."""
    lease = Lease(ticket, attempt, prompt(ticket))
    metas, tokens = pack_leases([lease])
    leases = {
        "leases": metas,
        "done": False,
        "leave": False,
        "reason": "staleness",
        "evaluations_left": False,
        "progress": step,
        "pause_s": 0.004,
    }
    meta, arrays = pack_group(make_group(lease, 0))
    shard = {"step": step, "outcome": "shard", "groups": [meta]}
    evaluation = {"outcome": "ended", "step": step, "metrics": METRICS}
    committed = {"metrics": METRICS, "state": b"state", "checkpoint_wanted": False}
    bodies: dict[str, tuple[Any, Sequence[Arrays]]] = {
        "leases": (leases, [tokens]),
        "finished": ({"kept": [{"ticket": ticket, "attempt": attempt, "evaluation": False}]}, []),
        "shard": (shard, [arrays]),
        "begun": ({"steps": step}, []),
        "committed": (committed, []),
        "values": ({"step": step}, [np.ones(3, dtype=np.float32)]),
        "trained": ({"metrics": METRICS}, []),
        "evaluation": (evaluation, []),
        "ok": ({"step": step, "generators": {"0": {"version": 1}}}, []),
        "error": ({"text": "it broke"}, []),
    }
    return {kind: frames_of(kind, body, arrays, seq=seq) for kind, (body, arrays) in bodies.items()}
