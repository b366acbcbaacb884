"""A critic in processes of its own: the learner ranks send it packed rows and returns, it sends values and metrics.

Learner rank r speaks to critic rank r modulo the number of critic ranks. All of a critic rank's learners send the
same kind of message before it acts, as the learner ranks act together.
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
from asyncrl.learner.critic import Critic
from asyncrl.learner.critic_rows import check_returns, check_rows, pack_row, unpack_rows
from asyncrl.learner.deepspeed_import import enable_determinism
from asyncrl.learner.distributed import process_group
from asyncrl.wire.bounds import Body
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import Message
from asyncrl.wire.kinds import KINDS
from asyncrl.wire.rpc import Connection, Reply, Server
from asyncrl.wire.service_messages import Error, Leave, Ok, Restore, Save, Train, Trained, Value, Values

log = structlog.get_logger()

TICK_S = 0.2
"""How late a critic sees that it should stop."""


def critic_part(rank: int) -> str:
    """Name of a critic rank among the writers of a checkpoint."""
    return f"critic-{rank}"


class RemoteCritic:
    """The value function of one learner rank, computed by a critic rank."""

    def __init__(self, config: Config, rank: int, endpoints: Endpoints) -> None:
        self.rank = rank
        self.timeout_s = config.launch.progress_timeout_s
        critic = rank % config.critic.ranks
        self.parts = tuple(critic_part(number) for number in range(config.critic.ranks))
        self._connection = Connection(endpoints, endpoints.critics[critic], f"critic rank {critic}")
        self._step = 0
        self._training, self._training_seq = Train(rank, 0), 0

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
        self._training_seq = self._connection.send(self._training, [returns.numpy()])

    def finish(self) -> dict[str, float]:
        answer = self._connection.await_answer(self._training, self._training_seq, timeout_s=self.timeout_s)
        return answer.body.metrics

    def save(self, folder: Path) -> None:
        """Has the critic write its model as the run's result; it knows the folder."""
        self._save(self._step, "model")

    def snapshot(self, folder: Path) -> Files:
        """Has the critic write its state to this checkpoint of the run."""
        self._save(step_of(folder), "state")
        return {}

    def restore(self, folder: Path) -> None:
        """Has the critic read its state from this checkpoint of the run."""
        self._connection.request(Restore(self.rank, step_of(folder)), timeout_s=self.timeout_s)

    def close(self) -> None:
        """Lets the critic rank end, which it does when all its learner ranks have left."""
        self._connection.send(Leave(self.rank))
        self._connection.close()

    def _save(self, step: int, what: Literal["model", "state"]) -> None:
        self._connection.request(Save(self.rank, step, what), timeout_s=self.timeout_s)


class CriticServer:
    """One critic rank: answers its learner ranks, a round of all of them at a time. A learner rank is one connection,
    the first that speaks for it."""

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
        """Checkpoints are in `run_dir`, and the model goes to `out_dir`: no message names a path."""
        self.critic = critic
        self.checkpoints, self.model_folder = run_dir / CHECKPOINTS, out_dir / "critic"
        self.learners = learners
        self.should_stop = should_stop
        self._writer = PartWriter(critic_part(critic.ranks.rank))
        self._peers: dict[int, bytes] = {}
        """The connection of every learner rank."""
        self._received: dict[int, Message] = {}
        """Messages of the round, by learner rank."""
        self._step = 0
        """Of the values that were given last."""
        self._spans: dict[int, list[slice]] = {}
        """Of every learner rank: where the action tokens of its micro-batches are in the joined batch."""
        handlers = dict.fromkeys((*_ANSWERS, Leave), self._collect)
        self._server = Server(endpoints, endpoints.critics[critic.ranks.rank], "critic", handlers)

    def serve(self) -> None:
        """Answers until all learner ranks have left or `should_stop`. Raises what the training raises, after the
        learner ranks were told."""
        while (received := self._round()) is not None:
            kinds = {type(message.body) for message in received.values()}
            if kinds == {Leave}:
                return
            try:
                if len(kinds) > 1:
                    names = sorted(KINDS[kind] for kind in kinds)
                    raise InvariantError(f"the learner ranks ask the critic for different things: {names}")
                replies = _ANSWERS[kinds.pop()](self, received)
            except AsyncrlError as error:
                self._answer(received, dict.fromkeys(received, Reply(Error(str(error)))))
                raise
            self._answer(received, replies)

    def close(self) -> None:
        self._server.close()
        self._writer.close(wait=False)  # a part that the learner ranks wait for is written before they leave

    def _round(self) -> dict[int, Message] | None:
        """One message of every learner rank; None when the process should stop. Raises RunError when a checkpoint
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
            self._server.send(message.peer, message.seq, replies[rank])

    def _collect(self, message: Message) -> None:
        """Adds a message to the round. Raises ProtocolError unless it is a request that this critic rank can act on."""
        kind, body, peer = message.kind, message.body, message.peer
        if body.rank not in self.learners:
            raise ProtocolError(f"{kind!r} of learner rank {body.rank}, this critic serves {self.learners}")
        if self._peers.get(body.rank, peer) != peer:
            raise ProtocolError(f"{kind!r} of learner rank {body.rank} by another than it")
        if isinstance(body, Value):
            config = self.critic.config
            vocabulary = self.critic.model.model.config.get_text_config().vocab_size
            check_rows(message, minibatches=config.learner.minibatches, vocabulary=vocabulary)
        elif isinstance(body, Train):
            if not self._spans:
                raise ProtocolError("train: no values were given that returns could be of")
            spans = self._spans[body.rank]
            check_returns(message, step=self._step, tokens=sum(span.stop - span.start for span in spans))
        self._peers[body.rank] = peer
        self._received[body.rank] = message

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
                    self._spans[rank].append(minibatches[-1][-1].span)
                    start += len(micro.targets)
                    ends[rank].append(slice(num_ends, num_ends + len(micro.ends)))
                    num_ends += len(micro.ends)
        none = torch.empty(0)
        (step,) = _agreed(messages, "step")
        self._step = step
        values, after = self.critic.values(Batch(minibatches, none, none, none), step).split([start, num_ends])
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
        return dict.fromkeys(messages, Reply(Trained(self.critic.finish())))

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
"""What a critic does with the messages of one round."""


def run_critic(
    config: Config, *, rank: int, endpoints: Endpoints, run_dir: Path, out_dir: Path, should_stop: Callable[[], bool]
) -> None:
    """One critic rank with a process of its own, until its learner ranks have left. Checkpoints are in `run_dir`; the
    model is written to `out_dir/critic`."""
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
    """What all the ranks' messages say under these names. Raises InvariantError when they differ."""
    said = {tuple(getattr(message.body, name) for name in names) for message in messages.values()}
    if len(said) > 1:
        raise InvariantError(f"the learner ranks ask the critic for different things: {sorted(said)}")
    return said.pop()
