"""The tables of all kinds of messages: their bodies, answers and limits.

The body of each kind is a `Body`: unknown and missing keys are refused, and every number, text and list has bounds, so
that a valid message fits the columns and arrays that it is written to. "error" may answer any request.
"""

from __future__ import annotations

from typing import Any, get_origin

from asyncrl.wire.bounds import Body
from asyncrl.wire.messages import (
    Ask,
    Begin,
    Begun,
    Commit,
    Committed,
    Evaluated,
    EvaluationResult,
    Finished,
    GroupHeader,
    LeaseHeader,
    Leases,
    Lost,
    NextEvaluation,
    ReadStatus,
    ReadSummary,
    Release,
    Scale,
    ShardHeader,
    Shutdown,
    Stop,
    Take,
)
from asyncrl.wire.service_messages import (
    Error,
    Leave,
    Ok,
    Restore,
    Save,
    Train,
    Trained,
    Value,
    Values,
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
    "next_evaluation": NextEvaluation,
    "evaluation": EvaluationResult,
    "lost": Lost,
    "scale": Scale,
    "status": ReadStatus,
    "summary": ReadSummary,
    "stop": Stop,
    "shutdown": Shutdown,
    "value": Value,
    "values": Values,
    "train": Train,
    "trained": Trained,
    "save": Save,
    "restore": Restore,
    "leave": Leave,
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
    "next_evaluation": "evaluation",
    "value": "values",
    "train": "trained",
    "save": "ok",
    "restore": "ok",
    "lost": "ok",
    "scale": "ok",
    "status": "ok",
    "summary": "ok",
    "stop": "ok",
    "shutdown": "ok",
}
"""The kind of the answer to each request."""

REQUESTS = frozenset(BODIES) - frozenset(ANSWERS.values()) - {"error"}
"""Kinds that are sent to a listening socket."""

WITH_ARRAYS = frozenset({"leases", "finish", "shard", "value", "values", "train"})
"""Kinds that may carry arrays."""
