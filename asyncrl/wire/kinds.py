"""The tables of all kinds of messages: their bodies, answers and limits.

The body of each kind is a `Body`: unknown and missing keys are refused, and every number, text and list has bounds, so
that a valid message fits the columns and arrays that it is written to. "error" may answer any request.
"""

from __future__ import annotations

from typing import Any, get_origin

from asyncrl.wire.bounds import Body
from asyncrl.wire.directory_messages import Announce, Located, LookUp
from asyncrl.wire.environment_messages import Turns, Wishes
from asyncrl.wire.launcher_messages import Lost, Memory, ReadStatus, ReadSummary, Scale, Shutdown, Stop
from asyncrl.wire.learner_messages import (
    Begin,
    Begun,
    Commit,
    Committed,
    EvaluationResult,
    NextEvaluation,
    ShardHeader,
    Take,
)
from asyncrl.wire.messages import Ask, Evaluated, Finished, GroupHeader, LeaseHeader, Leases, Release
from asyncrl.wire.service_messages import (
    Error,
    Leave,
    Ok,
    Restore,
    Save,
    Score,
    Scores,
    StoreReply,
    StoreRequest,
    Train,
    Trained,
    Value,
    Values,
)
from asyncrl.wire.version_messages import Followers, Publish
from asyncrl.wire.weight_messages import (
    Abort,
    Closed,
    Dropped,
    Go,
    Holding,
    Join,
    Left,
    Manifest,
    Offer,
    Patience,
    Ping,
    Pong,
    Ready,
    Received,
    Sent,
    Up,
)

BODIES: dict[str, Any] = {
    "ask": Ask,
    "leases": Leases[LeaseHeader],
    "finish": GroupHeader,
    "finished": Finished,
    "evaluated": Evaluated,
    "release": Release,
    "begin": Begin,
    "begun": Begun,
    "take": Take,
    "shard": ShardHeader,
    "commit": Commit,
    "committed": Committed,
    "publish": Publish,
    "followers": Followers,
    "next_evaluation": NextEvaluation,
    "evaluation": EvaluationResult,
    "lost": Lost,
    "scale": Scale,
    "memory": Memory,
    "status": ReadStatus,
    "summary": ReadSummary,
    "stop": Stop,
    "shutdown": Shutdown,
    "announce": Announce,
    "look_up": LookUp,
    "located": Located,
    "value": Value,
    "values": Values,
    "train": Train,
    "trained": Trained,
    "save": Save,
    "restore": Restore,
    "leave": Leave,
    "score": Score,
    "scores": Scores,
    "turns": Turns,
    "wishes": Wishes,
    "store": StoreRequest,
    "stored": StoreReply,
    "join": Join,
    "up": Up,
    "ready": Ready,
    "holding": Holding,
    "received": Received,
    "left": Left,
    "ping": Ping,
    "manifest": Manifest,
    "offer": Offer,
    "go": Go,
    "patience": Patience,
    "sent": Sent,
    "abort": Abort,
    "dropped": Dropped,
    "closed": Closed,
    "pong": Pong,
    "ok": Ok,
    "error": Error,
}
"""Every kind of message, with its body."""

KINDS: dict[type[Body], str] = {get_origin(body) or body: kind for kind, body in BODIES.items()}
"""The kind of each body."""

ANSWERS: dict[str, str] = {
    "ask": "leases",
    "finish": "finished",
    "evaluated": "finished",
    "release": "ok",
    "begin": "begun",
    "take": "shard",
    "commit": "committed",
    "publish": "followers",
    "next_evaluation": "evaluation",
    "value": "values",
    "train": "trained",
    "save": "ok",
    "restore": "ok",
    "score": "scores",
    "turns": "wishes",
    "store": "stored",
    "lost": "ok",
    "scale": "ok",
    "memory": "ok",
    "status": "ok",
    "summary": "ok",
    "stop": "ok",
    "shutdown": "ok",
    "announce": "ok",
    "look_up": "located",
}
"""The kind of the answer to each request."""

TO_SENDER = frozenset({"join", "up", "ready", "holding", "received", "left", "ping", "store"})
"""Kinds that a receiver of weights sends."""
TO_RECEIVER = frozenset({"manifest", "offer", "go", "patience", "sent", "abort", "dropped", "closed", "pong", "stored"})
"""Kinds that the sender of weights sends."""

REQUESTS = frozenset(BODIES) - frozenset(ANSWERS.values()) - TO_RECEIVER - {"error"}
"""Kinds that are sent to a listening socket."""

WITH_ARRAYS = frozenset({"leases", "finish", "evaluated", "shard", "value", "values", "train", "turns", "wishes"})
"""Kinds that may carry arrays."""

MAX_HEADER_BYTES = 1 << 28
"""Maximum size of an answer's header, which may hold many prompts with their documents."""
MAX_REQUEST_HEADER_BYTES = 1 << 21
"""Maximum size of a request's header. Any peer can send one, and nested lists take forty bytes of memory per byte while
they are decoded. A thousand trajectories with ten reward parts and an error each take less than half of it."""
MAX_TEXT_HEADER_BYTES = 1 << 26
"""The same of a request to the reward model, which has prompt and completions as text, and to an environment host,
which has rows of the data."""


def max_header_bytes(kind: str) -> int:
    """Maximum size of the header of a message of this kind."""
    if kind in ("score", "turns"):
        return MAX_TEXT_HEADER_BYTES
    return MAX_REQUEST_HEADER_BYTES if kind in REQUESTS else MAX_HEADER_BYTES
