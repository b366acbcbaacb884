"""One sound message of every kind, as `encode` returns it, for the fuzzer to mutate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import structs

from asyncrl.replay.codec import pack_group
from asyncrl.types import Lease, Prompt
from asyncrl.wire import messages as m
from asyncrl.wire import service_messages as s
from asyncrl.wire.frames import Arrays, encode, pack_lists
from tests.helpers.replay import PROMPT_TOKENS, make_group

TURNS = s.HostRequest(
    started=[s.EpisodeStart("0.0.0", Prompt(7, np.array([1, 2], np.int32), "42", "test", {"level": 1}), 5)],
    turns=[s.SampledTurn("0.0.1", 0, "completed")],
    dropped=["0.0.2"],
)
WISHES = s.HostReply(
    turns=[s.NextTurn("0.0.0", 1, 0, 12, 8, ["."])],
    ended=[
        s.EpisodeEnded("0.0.1", "failed", "timeout", 0.0, {"calls": 1.0}, [0.5], [0], 0.25, "it took too long", b"[]")
    ],
    stuck=1,
)
RUN_ID = "fuzz"
GROUP_SIZE = 2
ANNOUNCED = m.Announced(3, "v000003-0123abcd")
FOLLOWING = m.Following(held=2, fetching=3, unread="v000003-0123abcd", problem="it broke")
STATS = m.GeneratorStats(
    tokens=12,
    samples=3,
    waiting_s=0.5,
    working_s=1.0,
    syncing_s=0.0,
    writing_s=0.0,
    environments_s=0.25,
    engine_s=0.75,
    requests_s=0.125,
    rewards_s=0.0,
    messages_s=0.0625,
    engine_cpu_s=0.5,
    stall_ms=[2.0, 3.5],
    recomputed_tokens=7,
    rewards_failed=1,
    costs=[0.01, 1e-4, 2e-3, 0.1],
    peak_memory_bytes=1 << 30,
    live_episodes=6,
    waiting_episodes=4,
    weights=FOLLOWING,
)
METRICS = {"learner/loss": 0.25, "learner/wait_s": 0.1, "weights/broadcasts": 3.0}


PUSHED: list[m.Body] = [
    s.Welcome('{"weights": [["a", "float32", [2, 3]]], "bytes": 1024}', 1, False),
    s.Offer(2, 3, "gloo", 1 << 20, False),
    s.Go(2, 1, rank=1, size=2),
    s.Patience(2),
    s.Sent(2, 1 << 60),
    s.Abort(2, "it broke"),
    s.Dropped("it was late"),
    s.Closed(),
    s.Pong(),
]
"""The messages of the sender of s."""


def frames_of(body: m.Body, arrays: Sequence[Arrays] = (), *, seq: int = 1) -> list[bytes]:
    return [bytes(frame) for frame in encode(RUN_ID, body, seq=seq, arrays=arrays)]


def prompt(row: int) -> Prompt:
    chat = [{"role": "user", "content": "1+1="}]
    tokens = np.arange(PROMPT_TOKENS, dtype=np.int32)
    return Prompt(row, tokens, "2", "test", {"index": row, "tags": ["a", None]}, chat, {"level": 1.5})


def finish_frames(ticket: int, attempt: int, row: int, version: int, *, seq: int = 1) -> list[bytes]:
    """As `GeneratorClient` sends it: all arrays in one frame."""
    header, block = pack_group(make_group(Lease(ticket, attempt, prompt(row)), version))
    return frames_of(header, [block], seq=seq)


def ask_body(
    generator: int,
    version: int,
    num_groups: int,
    *,
    session: str = "0f" * 16,
    number: int = 1,
    num_evaluations: int = 2,
) -> m.Ask:
    return m.Ask(
        generator=generator,
        session=session,
        number=number,
        version=version,
        num_groups=num_groups,
        num_evaluations=num_evaluations,
        stats=STATS,
    )


def evaluated_body(ticket: int, attempt: int, version: int) -> m.Evaluated:
    return m.Evaluated(ticket, attempt, version, "test", [1.0], ["completed"], tokens=3, recorded=None)


def commit_body(step: int, *, epoch: int = 0) -> m.Commit:
    return m.Commit(epoch, step, METRICS, saving=False, checkpoints=[])


def requests(step: int = 0) -> dict[str, list[bytes]]:
    """By kind, what roles ask; `step` steps are committed."""
    rows = [np.arange(6, dtype=np.int32), np.array([4, 2], dtype=np.int32), np.array([1, 2, 4], dtype=np.int32)]
    recorded, block = pack_group(make_group(Lease(0, 0, prompt(0)), step))
    value = s.Value(0, 1, minibatches=[1], names=[[(0, 0), (0, 1)]])
    bodies: list[m.Body] = [
        ask_body(1, step, 2),
        m.Release(0, [m.ReleasedLease(0, 0, tokens=3)], [m.ReleasedEvaluation(1, 0)]),
        m.Take(0, 0, step + 1),
        m.Begin(0, 0, step),
        commit_body(step + 1),
        m.Publish(0, ANNOUNCED),
        m.NextEvaluation(0, after=0),
        m.Lost(1),
        m.Scale(2),
        m.Memory("reward_model", 1 << 30),
        m.ReadStatus(),
        m.ReadSummary(),
        m.Shutdown(),
        m.Stop("enough"),
        m.Announce("weights", "tcp://10.0.0.1:5", 0),
        m.LookUp("weights", 0),
        s.Save(0, 1, "model"),
        s.Restore(0, 1),
        s.Leave(0),
        s.Score([{"role": "user", "content": "1+1="}], ["2", "3"], timeout_s=1.5, template_options={}),
        s.StoreRequest(1, "add", ["group/1/rank"], b"", 2),
        s.Join(1, "cpu", "host-1"),
        s.Up(),
        s.Ready(2),
        s.Holding(2),
        s.Received(2, 1 << 60, "it broke"),
        s.Left(),
        s.Ping(),
    ]
    return {
        **{type(body).__name__: frames_of(body) for body in bodies},
        "GroupHeader": finish_frames(0, 0, 0, step),
        "Evaluated": frames_of(structs.replace(evaluated_body(0, 0, step), recorded=recorded), [block]),
        "Value": frames_of(value, rows),
        "Train": frames_of(s.Train(0, 1), [np.ones(3, dtype=np.float32)]),
        "HostRequest": frames_of(TURNS, pack_lists([np.ones(3, dtype=np.int32), np.ones(2, dtype=np.int32)])),
    }


def answers(seq: int = 1, *, ticket: int = 0, attempt: int = 0, step: int = 1) -> dict[str, list[bytes]]:
    """By kind, what roles are answered."""
    lease = Lease(ticket, attempt, prompt(ticket))
    leases = m.Leases(
        leases=[lease],
        done=False,
        leave=False,
        reason="staleness",
        evaluations_left=False,
        progress=step,
        batches=1,
        pause_s=0.004,
        weights="",
        stored=ANNOUNCED,
    )
    header, arrays = pack_group(make_group(lease, 0))
    bodies: list[tuple[m.Body, Sequence[Arrays]]] = [
        (leases, []),
        (m.Finished(), []),
        (m.ShardHeader(step, "shard", [header]), [arrays]),
        (m.Begun(step), []),
        (m.Committed(METRICS, b"state", checkpoint_wanted=False, stopping=False, batches=1, collapsed=False), []),
        (s.Values(step), [np.ones(3, dtype=np.float32)]),
        (m.Followers([m.Follower(1, FOLLOWING)]), []),
        (s.Trained(METRICS), []),
        (m.EvaluationResult("ended", step, METRICS), []),
        (m.Located("tcp://10.0.0.1:5"), []),
        (m.Ok({"step": step, "generators": {"0": {"version": 1}}}), []),
        (s.Scores([0.5, None], ["", "it broke"]), []),
        (WISHES, pack_lists([np.ones(2, dtype=np.int32)])),
        (s.StoreReply(1, [b"2", None], 2, ""), []),
        *((body, []) for body in PUSHED),
        (m.Error("it broke"), []),
    ]
    return {type(body).__name__: frames_of(body, arrays, seq=seq) for body, arrays in bodies}
