"""The critic: one value for the state before every action token, trained towards the returns. It runs in the learner's
processes, or in separate ones.

Truncated sequences may have an additional value, of the state after the last token. It is never trained.

Of separate processes, learner rank r connects to critic rank r modulo the number of critic ranks, and sends packed rows
and returns; it gets values and metrics. A critic rank handles a kind of message only when all of its learner ranks have
sent it, since the learner ranks act together. What a lost connection takes with it is sent again, and done once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from asyncrl.algorithms.losses import value_loss
from asyncrl.config.config import Config
from asyncrl.errors import AsyncrlError, InvariantError, ProtocolError
from asyncrl.learner.batch import Batch, MicroBatch, Name
from asyncrl.learner.checkpoint import (
    CHECKPOINTS,
    Files,
    PartWriter,
    folder_name,
    partial_folder,
    step_of,
    tensors_file,
)
from asyncrl.learner.distributed import Ranks, enable_determinism, process_group
from asyncrl.learner.learning_rate import learning_rate
from asyncrl.learner.model.attention import Integers, SequenceParallel, checked, find_firsts, make_layout
from asyncrl.learner.model.engine import TrainedModel
from asyncrl.learner.model.loading import hidden_states, load_value_model
from asyncrl.learner.model.model_checks import check_packing
from asyncrl.learner.model.saving import collect_state, exported_files, restore_state, save_model
from asyncrl.learner.update import Minibatch, may_be_empty, plan_updates, skip_if_not_finite, sync_microbatches
from asyncrl.util.processes import peak_memory_bytes
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import NAMES, Array, Message
from asyncrl.wire.messages import Error, Ok
from asyncrl.wire.rpc import Connection, Reply, Server, announce, located
from asyncrl.wire.service_messages import Leave, Restore, Save, Train, Trained, Value, Values

log = structlog.get_logger()
RESEND_S = 10.0
"""A request without an answer is sent again after this time, in addition to the requests of a lost connection: rows
are large, and the critic takes its time."""
TICK_S = 0.2
"""Interval at which a critic checks whether it should stop."""


class Critic:
    """The critic in the learner's processes, in a separate DeepSpeed engine."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config = config
        self.ranks = ranks
        self.data_ranks = ranks.of_data
        self.model = CriticModel(config, ranks)
        self._step = 0
        self._minibatches: list[Minibatch] = []
        self._values = torch.empty(0)
        self._metrics: dict[str, float] = {}

    def values(self, batch: Batch, step: int) -> Tensor:
        """Returns values [N + C] of the batch, float32, on the CPU: those before its action tokens, then those after
        the last tokens of its `ended` sequences. All ranks call it."""
        self._step = step
        self._minibatches = sync_microbatches(
            batch.minibatches, batch.num_members, self.data_ranks, step, may_be_empty=may_be_empty(self.config)
        )
        parts: list[Tensor] = []
        ends: list[Tensor] = []
        for micro in (micro for minibatch in self._minibatches for micro in minibatch.micro_batches):
            valued = replace(micro, logit_index=torch.cat([micro.logit_index, micro.ends]))
            values = self.model.score(valued.to(self.ranks.device)).cpu()
            parts.append(values[: len(micro.logit_index)])
            ends.append(values[len(micro.logit_index) :])
        self._values = torch.cat(parts)
        return torch.cat([self._values, *ends])

    def train(self, returns: Tensor) -> None:
        """Trains on the returns [N] of the batch most recently passed to `values`. All ranks call it."""
        settings = self.config.learner
        lr = learning_rate(self._step, settings, steps=self.config.steps) / settings.lr * self.config.critic.lr
        total = torch.zeros(3, dtype=torch.float64)
        norms: list[float] = []
        skipped = 0
        for minibatch in plan_updates(self._minibatches, epochs=settings.epochs):
            sums = torch.zeros_like(total)
            finite: list[Tensor] = []
            for micro, last in minibatch.on(self.ranks.device):
                values = self.model.engine(micro)
                gradient, counted = self._loss(micro, values.detach(), returns, minibatch.num_tokens)
                sums += counted
                finite.append(values.detach().isfinite() & gradient.isfinite())
                self.model.backward(values, gradient, last=last)
            norm = self.model.gradient_norm()
            if skip_if_not_finite(self.model, minibatch, finite, norm, self._step, "critic.lr"):
                skipped += 1
                continue
            self.model.step(lr=lr, max_grad_norm=settings.max_grad_norm, grad_norm=norm)
            total += sums
            norms.append(norm)
        loss, clipped, tokens = self.data_ranks.sum(total).tolist()
        metrics = self._describe(returns) | {"critic/lr": lr, "critic/skipped_updates": float(skipped)}
        if norms:
            metrics |= {
                "critic/loss": loss / tokens,
                "critic/clip_fraction": clipped / tokens,
                "critic/grad_norm": sum(norms) / len(norms),
            }
        self._metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _loss(self, micro: MicroBatch, values: Tensor, returns: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Returns the gradient [N] of the micro-batch's part of the loss, and three sums for the metrics: token losses,
        number of values outside the clip range, number of action tokens."""
        clip = self.config.critic.clip
        leaf = values.clone().requires_grad_()
        old = self._values[micro.span].to(values.device)
        loss = value_loss(leaf, old, returns[micro.span].to(values.device), clip=clip)
        (gradient,) = torch.autograd.grad(loss.sum() / num_tokens, leaf)
        outside = (values - old).abs() > (float("inf") if clip is None else clip)
        sums = torch.stack([loss.detach().sum().double(), outside.sum().double()]).cpu()
        return gradient, torch.cat([sums, sums.new_tensor([len(old)])])

    def finish(self) -> dict[str, float]:
        """Returns the metrics of the training."""
        return self._metrics

    def save(self, folder: Path) -> None:
        """Writes the critic to `folder` in Hugging Face format. All ranks call it."""
        save_model(self.model, folder)

    def snapshot(self, folder: Path) -> Files:
        """Returns this rank's files of the critic in a checkpoint. All ranks call it."""
        files = exported_files(self.model, "critic_model")
        return files | {f"critic/rank-{self.ranks.rank}.safetensors": tensors_file(collect_state(self.model))}

    def restore(self, folder: Path) -> None:
        """Loads the critic from the checkpoint in `folder`. All ranks call it."""
        restore_state(self.model, folder / "critic")

    def _describe(self, returns: Tensor) -> dict[str, float]:
        columns = torch.stack([returns, self._values]).double()
        error = columns[0] - columns[1]
        count = torch.tensor(float(len(returns)), dtype=torch.float64)
        moments = torch.stack([columns[1].sum(), columns[0].sum(), columns[0].square().sum(), error.sum(),
                               error.square().sum(), count])  # fmt: skip
        values, total, squares, errors, error_squares, count = self.data_ranks.sum(moments).tolist()
        variance = squares / count - (total / count) ** 2
        unexplained = error_squares / count - (errors / count) ** 2
        metrics = {"critic/value_mean": values / count, "critic/return_mean": total / count}
        if variance > 1e-12:
            metrics["critic/explained_variance"] = 1 - unexplained / variance
        return metrics


class CriticModel(TrainedModel):
    def __init__(self, config: Config, ranks: Ranks) -> None:
        path, key = config.critic.path, "critic.path"
        if path is None:
            path, key = config.model.path, "model.path"
        model, head = load_value_model(config, path, key)
        network = ValueNetwork(model, head)
        # The policy's tokenizer made the tokens.
        super().__init__(config, ranks, model, network, lr=config.critic.lr, folders=[path, config.model.path])
        check_packing(model, self.score, ranks.device, name := f"{key} = {path!r}")
        network.parallel = checked(ranks.parallel, model, name)


class ValueNetwork(nn.Module):
    """The model's body and a linear head with one output, as the module that DeepSpeed wraps."""

    def __init__(self, model: PreTrainedModel, head: nn.Linear) -> None:
        super().__init__()
        self.model = model
        self.parallel: SequenceParallel | None = None
        """The ranks that share this one's sequences, from when the network is checked on."""
        self.head = ValueHead(head)

    def forward(self, micro: MicroBatch) -> Tensor:
        states, local = hidden_states(self.model, micro, self.parallel)
        values = self.head(states)
        if self.parallel is None or local is None:
            return values
        return self.parallel.collect(values, local, len(micro.logit_index))


class ValueHead(nn.Module):
    """The model's linear head, computed in float32 for every dtype of its parameters. In bfloat16, values near 1 would
    be multiples of 1/128, which is too coarse for advantages, the differences of neighboring values.

    The module shares the head's parameters, so that ZeRO stage 3 gathers them for this module.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns values [N], float32, of hidden states [N, size]."""
        bias = None if self.bias is None else self.bias.float()
        return linear(hidden.float(), self.weight.float(), bias).squeeze(-1)


class RemoteCritic:
    """The critic of one learner rank, computed by a critic rank. It has the methods of `Critic`; the critic rank trains
    until `finish`, and writes its own files where it is to save."""

    model = None
    """No model is in this process."""

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
        sizes, names = [len(parts) for parts in batch.minibatches], [micro.names for micro in batch.micro_batches]
        body = Value(self.rank, step, minibatches=sizes, names=names)
        arrays = [array for micro in batch.micro_batches for array in _pack_row(micro)]
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
        self._request(Save(self.rank, self._step, "model"))

    def snapshot(self, folder: Path) -> Files:
        self._request(Save(self.rank, step_of(folder), "state"))
        return {}

    def restore(self, folder: Path) -> None:
        self._request(Restore(self.rank, step_of(folder)))

    def close(self) -> None:
        """Tells the critic rank that this learner rank has left. The critic rank ends when all of them have."""
        self._connection.send(Leave(self.rank))
        self._connection.close()

    def _request(self, body: Save | Restore) -> None:
        self._connection.request(body, timeout_s=self.timeout_s)


def critic_part(rank: int) -> str:
    """Returns the name of a critic rank as the writer of a part of a checkpoint."""
    return f"critic-{rank}"


def run_critic(
    config: Config, *, rank: int, endpoints: Endpoints, run_dir: Path, out_dir: Path, should_stop: Callable[[], bool]
) -> None:
    """Runs one critic rank in this process until its learner ranks have left. Checkpoints are in `run_dir`; the model
    is written to `out_dir/critic`."""
    launch, count = config.launch, config.critic.ranks
    peers = replace(endpoints, learners=endpoints.critic_ranks)
    if config.deterministic:
        enable_determinism()
    with process_group(
        peers,
        rank,
        count,
        start_timeout_s=launch.start_timeout_s,
        timeout_s=launch.progress_timeout_s,
        what="critic",
    ) as ranks:
        learners = [learner for learner in range(launch.learners) if learner % count == rank]
        critic = Critic(config, ranks)
        server = CriticServer(
            critic, endpoints, learners=learners, run_dir=run_dir, out_dir=out_dir, should_stop=should_stop
        )
        try:
            log.info("critic is up", rank=rank)
            server.serve()
        finally:
            server.close()


class CriticServer:
    """One critic rank. It answers its learner ranks in rounds of one request from each. A request that is sent again
    after its round gets the same answer again.

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
        self._received: dict[int, Message] = {}
        """Requests of the current round, by learner rank."""
        self._rows: dict[int, list[list[MicroBatch]]] = {}
        """The packed rows in them."""
        self._answered: dict[int, tuple[int, Reply]] = {}
        """The number of each learner rank's last request that was answered, and the answer."""
        self._step = 0
        """Step of the values that were sent last."""
        self._spans: dict[int, list[slice]] = {}
        """Ranges of the action tokens of each learner rank's micro-batches in the joined batch."""
        self._answers = {Value: self._value, Train: self._train, Save: self._save, Restore: self._restore}
        address = endpoints.critics[critic.ranks.rank]
        self._server = Server(endpoints, address, "critic", dict.fromkeys((*self._answers, Leave), self._collect))
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
                    names = sorted(kind.__name__ for kind in kinds)
                    raise InvariantError(f"the learner ranks send the critic different requests: {names}")
                replies = self._answers[kinds.pop()](received)
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

    def _collect(self, message: Message) -> Reply | None:
        """Adds a request to the round; returns the answer of one that has been answered. Raises ProtocolError unless it
        is valid for this critic rank."""
        body = message.body
        if body.rank not in self.learners:
            raise ProtocolError(f"{message.kind!r} of learner rank {body.rank}, this critic serves {self.learners}")
        answered, reply = self._answered.get(body.rank, (0, None))
        if 0 < message.seq <= answered:
            return reply if message.seq == answered else None
        if isinstance(body, Value):
            self._rows[body.rank] = self._unpack(message)
        elif isinstance(body, Train):
            tokens = sum(span.stop - span.start for span in self._spans.get(body.rank, ()))
            arrays = [f"{NAMES[array.dtype]}{list(array.shape)}" for array in message.arrays]
            if body.step != self._step or arrays != [f"f4[{tokens}]"]:
                raise ProtocolError(
                    f"train: step {body.step} with frames {arrays[:3]}, expected f4[{tokens}] of step {self._step}"
                )
        self._received[body.rank] = message
        return None

    def _unpack(self, message: Message) -> list[list[MicroBatch]]:
        """Returns the micro-batches of each mini-batch. Raises ProtocolError unless the rows are complete."""
        body, arrays, rows = message.body, message.arrays, len(message.body.names)
        if len(body.minibatches) != self.critic.config.learner.minibatches or sum(body.minibatches) != rows:
            raise ProtocolError(f"value: {rows} rows in mini-batches of {body.minibatches[:10]}")
        if len(arrays) != 3 * rows or any(NAMES[array.dtype] != "i4" for array in arrays):
            raise ProtocolError(f"value: {rows} rows need 3 frames each, of i4")
        columns = (array.astype(np.int64) for array in arrays)
        unpacked = iter([_unpack_row(*row) for row in zip(columns, columns, columns, body.names, strict=True)])
        vocabulary = self.critic.model.model.config.get_text_config().vocab_size
        largest = max((int(array.max()) for array in arrays[::3]), default=0)
        if largest >= vocabulary:
            raise ProtocolError(
                f"value: token {largest}, but the critic's vocabulary has {vocabulary}; set critic.path to a model "
                "with the tokens of model.path"
            )
        return [[next(unpacked) for _ in range(count)] for count in body.minibatches]

    def _answer(self, received: dict[int, Message], replies: dict[int, Reply]) -> None:
        for rank, message in received.items():
            self._answered[rank] = message.seq, replies[rank]
            self._server.send(message.peer, message.seq, replies[rank])

    def _value(self, messages: dict[int, Message]) -> dict[int, Reply]:
        (self._step,) = _agreed(messages, "step")
        minibatches: list[list[MicroBatch]] = []
        owners: list[int] = []
        start = 0
        for number in range(self.critic.config.learner.minibatches):
            minibatches.append([])
            for rank in messages:
                for micro in self._rows[rank][number]:
                    minibatches[-1].append(replace(micro, start=start))
                    owners.append(rank)
                    start += len(micro.targets)
        self._rows = {}
        none = torch.empty(0)
        batch = Batch(minibatches, none, none, none, none)
        values = self.critic.values(batch, self._step)
        after = values[start:].split([len(micro.ends) for micro in batch.micro_batches])
        self._spans = {rank: [] for rank in messages}
        ends: dict[int, list[Tensor]] = {rank: [] for rank in messages}
        for rank, micro, end in zip(owners, batch.micro_batches, after, strict=True):
            self._spans[rank].append(micro.span)
            ends[rank].append(end)
        parts = {rank: [none, *(values[span] for span in self._spans[rank]), *ends[rank]] for rank in messages}
        return {rank: Reply(Values(self._step), [torch.cat(parts[rank]).numpy()]) for rank in messages}

    def _train(self, messages: dict[int, Message]) -> dict[int, Reply]:
        returns = torch.empty(sum(len(message.arrays[0]) for message in messages.values()))
        for rank, message in messages.items():
            column = torch.from_numpy(message.arrays[0].copy())
            parts = column.split([span.stop - span.start for span in self._spans[rank]])
            for span, part in zip(self._spans[rank], parts, strict=True):
                returns[span] = part
        self.critic.train(returns)
        peak = self.critic.ranks.max(torch.tensor([peak_memory_bytes()]))
        metrics = self.critic.finish() | {"critic/peak_memory_bytes": float(peak)}
        return dict.fromkeys(messages, Reply(Trained(metrics)))

    def _save(self, messages: dict[int, Message]) -> dict[int, Reply]:
        step, kind = _agreed(messages, "step", "what")
        if kind == "model":
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


def _agreed(messages: dict[int, Message], *names: str) -> tuple[Any, ...]:
    """Returns the fields `names`, which are equal in all ranks' messages. Raises InvariantError if they differ."""
    values = {tuple(getattr(message.body, name) for name in names) for message in messages.values()}
    if len(values) > 1:
        raise InvariantError(f"the learner ranks send the critic different requests: {sorted(values)}")
    return values.pop()


def _pack_row(micro: MicroBatch) -> list[Array]:
    """Returns the tokens, the sequence lengths, and the positions whose hidden states are valued. A position before an
    action token is never the last of its sequence, so last positions are always those of `ends`."""
    starts = torch.nonzero(micro.position_ids == 0).flatten()
    lengths = torch.diff(starts, append=torch.tensor([len(micro.input_ids)]))
    valued = torch.cat([micro.logit_index, micro.ends]).sort().values
    return [tensor.to(torch.int32).numpy() for tensor in (micro.input_ids, lengths, valued)]


def _unpack_row(input_ids: Integers, lengths: Integers, valued: Integers, names: list[Name]) -> MicroBatch:
    """Returns the micro-batch; fields that a critic does not need are zero."""
    size = len(input_ids)
    complete = len(names) == len(lengths) > 0 and lengths.min() > 0 and lengths.sum() == size and input_ids.min() >= 0
    if not complete or np.any(np.diff(valued, prepend=-1, append=size) <= 0):
        raise ProtocolError(
            f"value: a row of {size} tokens does not fit to its {len(names)} names, {len(lengths)} lengths and "
            f"{len(valued)} positions"
        )
    ends = np.cumsum(lengths)
    is_last = np.isin(valued, ends - 1)
    logit_index = valued[~is_last]
    nothing = torch.zeros(len(logit_index))
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(np.arange(size) - np.repeat(ends - lengths, lengths)),
        layout=make_layout(lengths, find_firsts(input_ids, lengths, np.array([ticket for ticket, _ in names]))),
        logit_index=torch.from_numpy(logit_index),
        targets=torch.from_numpy(input_ids[logit_index + 1]),
        behavior_logprobs=nothing,
        versions=nothing.long(),
        seq=torch.from_numpy(np.searchsorted(ends, logit_index, side="right")),
        names=names,
        ends=torch.from_numpy(valued[is_last]),
    )
