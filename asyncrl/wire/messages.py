"""The messages between generators, learners, the launcher and the replay queue, and the bounds of their values.

The kind of a message is the name of its body's class. Numbers, texts and lists have bounds, so that a valid message
fits the columns and arrays that it is written to.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import msgspec
from msgspec import Meta

from asyncrl.types import (
    MAX_COUNT,
    MAX_ITEMS,
    NO_VERSION,
    Count,
    EpisodeOutcome,
    Items,
    Lease,
    Name,
    Number,
    Reward,
    Status,
    Time,
)
from asyncrl.util.processes import GENERATOR_ACTIVITIES, GENERATOR_PHASES

MAX_INDEX = (1 << 16) - 1
MAX_PARTS = 256
"""Maximum number of parts of one trajectory's reward."""
MAX_TEXT_CHARACTERS = 1 << 16
MAX_DURATION_S = 3600.0
MAX_ROUTED = 4096
"""Upper limit of the layers with experts, and of the experts of a token."""
MAX_HEADER_BYTES = 1 << 28
"""Maximum size of an answer's header, which may hold many prompts with their documents."""
MAX_REQUEST_HEADER_BYTES = 1 << 21
"""Maximum size of a request's header. Any peer can send one, and nested lists take forty bytes of memory per byte while
they are decoded. A thousand trajectories with ten reward parts and an error each take less than half of it."""

T = TypeVar("T")
Version = Annotated[int, Meta(ge=NO_VERSION, le=MAX_COUNT)]
Index = Annotated[int, Meta(ge=0, le=MAX_INDEX)]
"""Index of a generator or a learner rank. Its bound limits the memory kept for each of them."""
Duration = Annotated[float, Meta(ge=0.0, le=MAX_DURATION_S)]
"""Seconds."""
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]
Metrics = Annotated[dict[Annotated[str, Meta(max_length=1000)], float], Meta(max_length=MAX_ITEMS)]
FolderName = Annotated[str, Meta(max_length=19, pattern=r"\Av[0-9]{6,10}-[0-9a-f]{8}\Z")]
"""The folder of a version in a store."""


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a message, or a part of one. It has no optional fields: a message has all of them, and no others."""

    max_header_bytes: ClassVar[int] = MAX_HEADER_BYTES
    has_arrays: ClassVar[bool] = False
    """True if the message may carry arrays."""


class AnswerBody(Body):
    """The body of an answer, or of a message that a server sends unasked."""


class Ok(AnswerBody):
    """The answer to requests without a specific answer."""

    result: dict[str, Any]
    """The requested values; empty if there are none."""


class Error(AnswerBody):
    """The answer to a bad request."""

    text: Text


class RequestBody(Body):
    """The body of a message to a listening socket."""

    max_header_bytes = MAX_REQUEST_HEADER_BYTES
    answer: ClassVar[type[AnswerBody]] = Ok


class Announced(Body):
    """A version that is complete in the store. Part of `Publish` and `Leases`."""

    version: Count
    folder: FolderName


class Following(Body):
    """The versions in the store that a generator has. Part of `GeneratorStats`."""

    held: Version
    """The last version that it has fetched; NO_VERSION before the first one."""
    fetching: Version
    """The version that it fetches; NO_VERSION while it fetches none."""
    unread: FolderName | None
    """The version that it could not read last; None once it has read another one."""
    problem: Text
    """Why."""


class Follower(Body):
    """Part of `Followers`: a live generator."""

    generator: Index
    following: Following


class Followers(AnswerBody):
    """The answer of the queue to `Publish`."""

    followers: Items[Follower]


class Publish(RequestBody):
    """Sent by learner rank 0 for each version that it has published, and from time to time again."""

    answer = Followers

    epoch: Count
    """As in the run's endpoints."""
    announced: Announced


class GeneratorStats(Body):
    """Part of `Ask`: stats that a generator sends with every ask; sums since its first ask."""

    tokens: Number
    """Action tokens generated."""
    samples: Number
    """Completions that these tokens are of."""
    waiting_s: Time
    """Time without a running request. This and the next four are activities of a Stopwatch."""
    working_s: Time
    syncing_s: Time
    writing_s: Time
    environments_s: Time
    """Time without a running request, in which all episodes waited for their environments."""
    engine_s: Time
    """Time of decoding steps. This and the next three are the phases of GENERATOR_PHASES."""
    requests_s: Time
    rewards_s: Time
    messages_s: Time
    engine_cpu_s: Time
    """CPU time, in `engine_s`, of the thread that runs the decoding steps."""
    stall_ms: Items[Time]
    """Duration of each weight swap since the last ask, during which the engine was stalled."""
    recomputed_tokens: Number
    """As `Engine.recomputed_tokens`."""
    rewards_failed: Number
    """Completions without a reward, because it could not be computed."""
    costs: Annotated[list[Time], Meta(max_length=4)]
    """Fitted costs in seconds: per engine step, per sequence in a step, per request, and from the last token of a group
    to its rewards; empty until known."""
    peak_memory_bytes: Number
    """As `asyncrl.util.processes` measures it; 0 until known."""
    live_episodes: Count
    """Episodes in progress."""
    waiting_episodes: Count
    """Episodes in progress that wait for their environments."""
    weights: Following | None
    """None unless versions come from a store."""

    @classmethod
    def of(cls, **values: Any) -> Self:
        """The stats with these values; the others are 0 or empty."""
        times = {f"{name}_s": 0.0 for name in (*GENERATOR_ACTIVITIES, *GENERATOR_PHASES, "engine_cpu")}
        names = "tokens", "samples", "recomputed_tokens", "rewards_failed", "peak_memory_bytes"
        counts = dict.fromkeys((*names, "live_episodes", "waiting_episodes"), 0)
        return cls(**{**counts, **times, "stall_ms": [], "costs": [], "weights": None, **values})


class Leases(AnswerBody):
    """The answer of the queue to `Ask`."""

    leases: Items[Lease]
    done: bool
    """The run is over or stopping: release unfinished leases and return."""
    leave: bool
    """The generator is not needed any more: it asks for nothing, finishes its leases and exits."""
    reason: Text
    """The limit that reduced the leases: "staleness", "bytes", "journal", "disk", "share" (of each generator), "scale",
    "session" (replaced by a newer one), or "" (nothing)."""
    evaluations_left: bool
    """Evaluation prompts of the loaded version are still open."""
    progress: Number
    """Changes whenever a learner begins, takes or commits."""
    batches: Count
    """As in `Committed`."""
    pause_s: Time
    """Minimum pause before the next ask of a generator that got fewer leases than it asked for, unless it loads another
    version first."""
    weights: Name
    """ZeroMQ address of the weights' sender, if it has announced itself; it moves with learner rank 0. Else empty."""
    stored: Announced | None
    """The newest version of the weights in a store; None unless they come from one."""


class Ask(RequestBody):
    """Sent by a generator for more leases, and as its heartbeat."""

    answer = Leases

    generator: Index
    session: Name
    """Name of this start of the generator."""
    number: Number
    """Number of the ask in its session, increasing; an ask that is sent again has the same number."""
    version: Version
    """Policy version loaded; NO_VERSION before the first one."""
    num_groups: Count
    num_evaluations: Count
    stats: GeneratorStats


class Finished(AnswerBody):
    """The answer of the queue to `GroupHeader` and `Evaluated`, which need not be sent again."""


class GroupHeader(RequestBody):
    """A group without its arrays, which are the tokens, action_mask, behavior_logprobs and versions of all trajectories
    end to end, and with a `routing` a flat array of theirs. Sent by a generator for each finished group. Also
    part of `ShardHeader`.

    The lists have an entry for each trajectory, of which a member of the group has one or more: its rows."""

    answer = Finished
    has_arrays = True

    ticket: Number
    attempt: Count
    generator: Index
    row: Number
    data_source: Name
    start_version: Version
    end_version: Version
    started_s: Time
    """A generator sends this and the next one as seconds before now; the queue keeps seconds of the run."""
    finished_s: Time
    reward_s: Time
    greedy_reward: Reward | None
    greedy_tokens: Count
    members: Items[Index]
    """The member that a trajectory is a row of, from 0; those of one member are adjacent."""
    lengths: Items[Count]
    rewards: Items[float]
    parts: Items[Annotated[dict[Name, float], Meta(max_length=MAX_PARTS)]]
    status: Items[Status]
    errors: Items[Text]
    episodes: Items[EpisodeOutcome]
    """Empty without an environment."""
    routing: Annotated[list[Annotated[int, Meta(ge=1, le=MAX_ROUTED)]], Meta(max_length=2)]
    """Layers with experts, and experts of a token in each; empty if the group has no routing."""

    @property
    def num_arrays(self) -> int:
        return 5 if self.routing else 4

    @property
    def num_members(self) -> int:
        """Members of a group that has been checked (`asyncrl.replay.codec.check_group`), as below."""
        return self.members[-1] + 1 if self.members else 0

    def of_members(self, column: Sequence[T]) -> Sequence[T]:
        """One value for each member: its first row's, of a column with an entry for each trajectory."""
        if len(column) == self.num_members:
            return column
        pairs = zip(column, self.members, [-1, *self.members], strict=False)
        return [value for value, member, before in pairs if member != before]

    def of_scored(self, column: Sequence[T]) -> list[T]:
        """As `of_members`, of the members that have a reward."""
        pairs = zip(self.of_members(column), self.of_members(self.status), strict=True)
        return [value for value, status in pairs if status != "failed"]

    def sums_of_members(self, column: Sequence[int]) -> Sequence[int]:
        """The sums over the rows of each member, of a column with an entry for each trajectory."""
        if len(column) == self.num_members:
            return column
        sums = [0] * self.num_members
        for value, member in zip(column, self.members, strict=True):
            sums[member] += value
        return sums


class Evaluated(RequestBody):
    """Sent by a generator for each evaluation prompt it has completed. Its arrays are those of `recorded`."""

    answer = Finished
    has_arrays = True

    ticket: Number
    attempt: Count
    version: Version
    """The policy version that sampled every token."""
    data_source: Name
    rewards: Items[Reward]
    """Reward of each completion; 0 where its status is failed."""
    status: Items[Status]
    tokens: Count
    """Tokens of all completions."""
    recorded: GroupHeader | None
    """The first completions, for the samples of the run; they are not stored in the journal."""


class ReleasedLease(Body):
    """Part of `Release`: a lease, and the action tokens generated for it so far."""

    ticket: Number
    attempt: Count
    tokens: Count


class ReleasedEvaluation(Body):
    """Part of `Release`: a lease of an evaluation prompt."""

    ticket: Number
    attempt: Count


class Release(RequestBody):
    """Sent by a generator for leases it will not finish."""

    generator: Index
    leases: Items[ReleasedLease]
    evaluations: Items[ReleasedEvaluation]


TakeOutcome = Literal["shard", "wait", "stop"]
EvaluationOutcome = Literal["ended", "wait", "none"]


class Begun(AnswerBody):
    """The answer of the queue to `Begin`."""

    steps: Count
    """Committed steps: up to this one the rank takes the same batches again."""


class Begin(RequestBody):
    """Sent by each learner rank when it starts."""

    answer = Begun

    rank: Index
    epoch: Count
    """As in the run's endpoints. From now on, messages of lower epochs are refused."""
    step: Count
    """Step of the checkpoint that the rank starts from; 0 without one."""


class ShardHeader(AnswerBody):
    """The answer of the queue to `Take`. "wait": the batch is not complete, ask again; "stop": there are no more
    batches."""

    has_arrays = True

    step: Count
    outcome: TakeOutcome
    groups: Items[GroupHeader]


class Take(RequestBody):
    """Sent by each learner rank for its part of a step's batch."""

    answer = ShardHeader

    rank: Index
    epoch: Count
    step: Count


class Committed(AnswerBody):
    """The answer of the queue to `Commit`."""

    metrics: Metrics
    """The queue's own metrics of the step; the same when it is committed again."""
    state: bytes
    """The queue's part of a checkpoint of this step; empty unless asked for."""
    checkpoint_wanted: bool
    """The journal approaches its size limit: a checkpoint would allow segments to be dropped."""
    stopping: bool
    """The run is to end with this step, even if the batch of the next one is taken already."""
    batches: Count
    """Batches that are not trained yet; 0 unless the next one is complete."""
    collapsed: bool
    """The run ends by `learner.on_collapse`: a checkpoint of this step would be of no use."""


class Commit(RequestBody):
    """Sent by learner rank 0 after each optimizer step."""

    answer = Committed

    epoch: Count
    step: Count
    metrics: Metrics
    saving: bool
    """A checkpoint of this step follows: the answer contains the queue's state."""
    checkpoints: Items[Count]
    """Steps of the complete checkpoints that exist."""


class EvaluationResult(AnswerBody):
    """The answer of the queue to `NextEvaluation`. "ended": a result; "wait": evaluations are running, ask again;
    "none": there are no more."""

    outcome: EvaluationOutcome
    step: Count
    metrics: Metrics


class NextEvaluation(RequestBody):
    """Sent by learner rank 0 after its last commit."""

    answer = EvaluationResult

    epoch: Count
    after: Count
    """Number of evaluations that the sender has received in this way."""


class Lost(RequestBody):
    """Sent by the launcher when the process of a generator has ended."""

    generator: Index


class Scale(RequestBody):
    """Sent by `asyncrl scale` to set the number of generators."""

    generators: Index


class Memory(RequestBody):
    """Sent by the reward model every few seconds."""

    role: Literal["reward_model"]
    peak_memory_bytes: Number
    """As `asyncrl.util.processes` measures it."""


class ReadStatus(RequestBody):
    """Sent by the launcher for the state of the run, which is in the `Ok`."""


class ReadSummary(RequestBody):
    """Sent by the launcher for the queue's part of the run's summary, which is in the `Ok`."""


class Stop(RequestBody):
    """Sent by the launcher to end the run early."""

    reason: Text


class Shutdown(RequestBody):
    """Sent by the launcher to end the replay process."""


class Announce(RequestBody):
    """Sent by a server that listens."""

    name: Name
    address: Name
    """ZeroMQ address."""
    epoch: Count
    """As in the run's endpoints; a lower one than the name's latest is refused."""


class Located(AnswerBody):
    """The answer of the queue to `LookUp`."""

    address: Name
    """Empty if no process has announced the name."""


class LookUp(RequestBody):
    """Sent by a client that will connect."""

    answer = Located

    name: Name
    epoch: Count
    """Announcements of earlier epochs do not count."""
