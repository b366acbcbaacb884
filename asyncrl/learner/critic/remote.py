"""A critic in separate processes: learner ranks send packed rows and returns, and it replies with values and metrics.

Learner rank r connects to critic rank r modulo the number of critic ranks. A critic rank handles a kind of message only
when all of its learner ranks have sent it, since the learner ranks act together. What a lost connection takes with it
is sent again, and done once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import structlog
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import AsyncrlError, InvariantError, ProtocolError
from asyncrl.learner.batch import Batch, MicroBatch
from asyncrl.learner.checkpoint.files import CHECKPOINTS, Files, PartWriter, folder_name, partial_folder, step_of
from asyncrl.learner.critic.rows import check_returns, check_rows, pack_row, unpack_rows
from asyncrl.learner.critic.value_function import Critic
from asyncrl.learner.distributed import process_group
from asyncrl.learner.model.deepspeed_import import enable_determinism
from asyncrl.util.memory import peak_memory_bytes
from asyncrl.wire.bounds import Body
from asyncrl.wire.directory import announce, located
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import Array, Message
from asyncrl.wire.kinds import KINDS
from asyncrl.wire.rpc import Connection, Reply, Server
from asyncrl.wire.service_messages import Error, Leave, Ok, Restore, Save, Train, Trained, Value, Values

log = structlog.get_logger()

RESEND_S = 10.0
"""A request without an answer is sent again after this time, in addition to those of a lost connection: rows are large,
and the critic takes its time."""
TICK_S = 0.2
"""Interval at which a critic checks whether it should stop."""


def critic_part(rank: int) -> str:
    """Returns the name of a critic rank as the writer of a part of a checkpoint."""
    return f"critic-{rank}"


class RemoteCritic:
    """The value function of one learner rank, computed by a critic rank."""

    def __init__(self, config: Config, rank: int, endpoints: Endpoints) -> None:
        self.rank = rank
        self.timeout_s = config.launch.progress_timeout_s
        critic = rank % config.critic.ranks
        self.parts = tuple(critic_part(number) for number in range(config.critic.ranks))
        start_s = config.launch.start_timeout_s
        address = located(endpoints, endpoints.critics[critic], timeout_s=start_s, own_epoch=True)
        self._connection = Connection(endpoints, address, f"critic rank {critic}", resend_s=RESEND_S)
        self._step = 0
        self._training, self._training_seq = Train(rank, 0), 0
        self._returns: list[Array] = []

    def values(self, batch: Batch, step: int) -> Tensor:
        self._step = step
        body = Value(
            self.rank,
            step,
            minibatches=[len(minibatch) for minibatch in batch.minibatches],
            names=[micro.names for micro in batch.micro_batches],
        )
        arrays = [array for micro in batch.micro_batches for array in pack_row(micro)]
        answer = self._connection.request(body, arrays, timeout_s=self.timeout_s)
        return torch.from_numpy(answer.arrays[0].copy())

    def train(self, returns: Tensor) -> None:
        self._training = Train(self.rank, self._step)
        self._returns = [returns.numpy()]
        self._training_seq = self._connection.send(self._training, self._returns)

    def finish(self) -> dict[str, float]:
        body, seq = self._training, self._training_seq
        return self._connection.await_answer(body, seq, self._returns, timeout_s=self.timeout_s).body.metrics

    def save(self, folder: Path) -> None:
        """Makes the critic write its model as the run's result. `folder` is unused: the critic knows the path."""
        self._save(self._step, "model")

    def snapshot(self, folder: Path) -> Files:
        """Makes the critic write its state to the run's checkpoint in `folder`."""
        self._save(step_of(folder), "state")
        return {}

    def restore(self, folder: Path) -> None:
        """Makes the critic load its state from the run's checkpoint in `folder`."""
        self._connection.request(Restore(self.rank, step_of(folder)), timeout_s=self.timeout_s)

    def close(self) -> None:
        """Tells the critic rank that this learner rank has left. The critic rank ends when all of them have."""
        self._connection.send(Leave(self.rank))
        self._connection.close()

    def _save(self, step: int, what: Literal["model", "state"]) -> None:
        self._connection.request(Save(self.rank, step, what), timeout_s=self.timeout_s)


class CriticServer:
    """One critic rank. It answers its learner ranks in rounds of one request from each. A learner rank is bound to the
    first connection that sends a request in its name. A request that is sent again after its round gets the same answer
    again.

    waits for                        woken by                    deadline
    a request of each learner rank   a message (ZeroMQ)          none here: learner ranks are watched by the launcher
    the other critic ranks           a collective                launch.progress_timeout_s
    """

    def __init__(
        self,
        critic: Critic,
        endpoints: Endpoints,
        *,
        learners: list[int],
        run_dir: Path,
        out_dir: Path,
        should_stop: Callable[[], bool],
    ) -> None:
        """Checkpoints are in `run_dir`, and the model is written to `out_dir`; messages contain no paths."""
        self.critic = critic
        self.checkpoints, self.model_folder = run_dir / CHECKPOINTS, out_dir / "critic"
        self.learners = learners
        self.should_stop = should_stop
        self._writer = PartWriter(critic_part(critic.ranks.rank))
        self._peers: dict[int, bytes] = {}
        """The connection of each learner rank."""
        self._received: dict[int, Message] = {}
        """Requests of the current round, by learner rank."""
        self._answered: dict[int, tuple[int, Reply]] = {}
        """The number of each learner rank's last request that was answered, and the answer."""
        self._step = 0
        """Step of the values that were sent last."""
        self._spans: dict[int, list[slice]] = {}
        """Ranges of the action tokens of each learner rank's micro-batches in the joined batch."""
        handlers = dict.fromkeys((*_ANSWERS, Leave), self._collect)
        address = endpoints.critics[critic.ranks.rank]
        self._server = Server(endpoints, address, "critic", handlers)
        announce(endpoints, address, self._server.address)

    def serve(self) -> None:
        """Answers requests until all learner ranks have left or `should_stop` returns True. Waits for one request of
        each learner rank. Errors of the training are sent to the learner ranks and then raised."""
        while (received := self._round()) is not None:
            kinds = {type(message.body) for message in received.values()}
            if kinds == {Leave}:
                return
            try:
                if len(kinds) > 1:
                    names = sorted(KINDS[kind] for kind in kinds)
                    raise InvariantError(f"the learner ranks send the critic different requests: {names}")
                replies = _ANSWERS[kinds.pop()](self, received)
            except AsyncrlError as error:
                self._answer(received, dict.fromkeys(received, Reply(Error(str(error)))))
                raise
            self._answer(received, replies)

    def close(self) -> None:
        self._server.close()
        self._writer.close(wait=False)  # a part that the learner ranks wait for is written before they leave

    def _round(self) -> dict[int, Message] | None:
        """Returns one request of each learner rank, or None if the process should stop. Raises RunError if a checkpoint
        could not be written."""
        self._received = {}
        while len(self._received) < len(self.learners):
            if error := self._writer.failure():
                raise error
            if self.should_stop():
                return None
            if self._server.poll(TICK_S):
                self._server.handle_next()
        return self._received

    def _answer(self, received: dict[int, Message], replies: dict[int, Reply]) -> None:
        for rank, message in received.items():
            self._answered[rank] = message.seq, replies[rank]
            self._server.send(message.peer, message.seq, replies[rank])

    def _collect(self, message: Message) -> Reply | None:
        """Adds a request to the round; returns the answer of one that has been answered. Raises ProtocolError unless it
        is valid for this critic rank."""
        kind, body, peer = message.kind, message.body, message.peer
        if body.rank not in self.learners:
            raise ProtocolError(f"{kind!r} of learner rank {body.rank}, this critic serves {self.learners}")
        if self._peers.get(body.rank, peer) != peer:
            raise ProtocolError(f"{kind!r} of learner rank {body.rank} came from another connection than its own")
        answered, reply = self._answered.get(body.rank, (0, None))
        if 0 < message.seq <= answered:
            return reply if message.seq == answered else None
        if isinstance(body, Value):
            config = self.critic.config
            vocabulary = self.critic.model.model.config.get_text_config().vocab_size
            check_rows(message, minibatches=config.learner.minibatches, vocabulary=vocabulary)
        elif isinstance(body, Train):
            if not self._spans:
                raise ProtocolError("train: no values were requested before these returns")
            spans = self._spans[body.rank]
            check_returns(message, step=self._step, tokens=sum(span.stop - span.start for span in spans))
        self._peers[body.rank] = peer
        self._received[body.rank] = message
        return None

    def _value(self, messages: dict[int, Message]) -> dict[int, Reply]:
        rows = {rank: unpack_rows(message) for rank, message in messages.items()}
        minibatches: list[list[MicroBatch]] = []
        self._spans = {rank: [] for rank in rows}
        ends: dict[int, list[slice]] = {rank: [] for rank in rows}
        start = num_ends = 0
        for number in range(self.critic.config.learner.minibatches):
            minibatches.append([])
            for rank, own in rows.items():
                for micro in own[number]:
                    minibatches[-1].append(replace(micro, start=start))
                    self._spans[rank].append(slice(start, start + len(micro.targets)))
                    start += len(micro.targets)
                    ends[rank].append(slice(num_ends, num_ends + len(micro.ends)))
                    num_ends += len(micro.ends)
        none = torch.empty(0)
        (step,) = _agreed(messages, "step")
        self._step = step
        values, after = self.critic.values(Batch(minibatches, none, none, none, none), step).split([start, num_ends])
        parts = {
            rank: [*(values[span] for span in self._spans[rank]), *(after[span] for span in ends[rank])]
            for rank in messages
        }
        return {rank: Reply(Values(step), [torch.cat([none, *own]).numpy()]) for rank, own in parts.items()}

    def _train(self, messages: dict[int, Message]) -> dict[int, Reply]:
        returns = torch.empty(sum(len(message.arrays[0]) for message in messages.values()))
        for rank, message in messages.items():
            own = torch.from_numpy(message.arrays[0].copy())
            parts = own.split([span.stop - span.start for span in self._spans[rank]])
            for span, part in zip(self._spans[rank], parts, strict=True):
                returns[span] = part
        self.critic.train(returns)
        peak = self.critic.ranks.max(torch.tensor([peak_memory_bytes()]))
        metrics = self.critic.finish() | {"critic/peak_memory_bytes": float(peak)}
        return dict.fromkeys(messages, Reply(Trained(metrics)))

    def _save(self, messages: dict[int, Message]) -> dict[int, Reply]:
        step, what = _agreed(messages, "step", "what")
        if what == "model":
            self.critic.save(self.model_folder)
        else:
            if error := self._writer.wait():
                raise error
            folder = partial_folder(self.checkpoints / folder_name(step))
            self._writer.start(folder, self.critic.snapshot(folder))
        return dict.fromkeys(messages, Reply(Ok({})))

    def _restore(self, messages: dict[int, Message]) -> dict[int, Reply]:
        (step,) = _agreed(messages, "step")
        self.critic.restore(self.checkpoints / folder_name(step))
        return dict.fromkeys(messages, Reply(Ok({})))


_ANSWERS: dict[type[Body], Callable[[CriticServer, dict[int, Message]], dict[int, Reply]]] = {
    Value: CriticServer._value,
    Train: CriticServer._train,
    Save: CriticServer._save,
    Restore: CriticServer._restore,
}
"""Handlers of one round's messages, by kind."""


def run_critic(
    config: Config, *, rank: int, endpoints: Endpoints, run_dir: Path, out_dir: Path, should_stop: Callable[[], bool]
) -> None:
    """Runs one critic rank in this process until its learner ranks have left. Checkpoints are in `run_dir`; the model
    is written to `out_dir/critic`."""
    launch, count = config.launch, config.critic.ranks
    own = replace(endpoints, learners=endpoints.critic_ranks)
    if config.deterministic:
        enable_determinism()
    with process_group(
        own, rank, count, start_timeout_s=launch.start_timeout_s, timeout_s=launch.progress_timeout_s, what="critic"
    ) as ranks:
        learners = [learner for learner in range(launch.learners) if learner % count == rank]
        server = CriticServer(
            Critic(config, ranks),
            endpoints,
            learners=learners,
            run_dir=run_dir,
            out_dir=out_dir,
            should_stop=should_stop,
        )
        try:
            log.info("critic is up", rank=rank)
            server.serve()
        finally:
            server.close()


def _agreed(messages: dict[int, Message], *names: str) -> tuple[Any, ...]:
    """Returns the fields `names`, which are equal in all ranks' messages. Raises InvariantError if they differ."""
    values = {tuple(getattr(message.body, name) for name in names) for message in messages.values()}
    if len(values) > 1:
        raise InvariantError(f"the learner ranks send the critic different requests: {sorted(values)}")
    return values.pop()
