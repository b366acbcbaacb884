"""A critic in a separate process produces the results of a critic in the learner's process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import GAE_CONFIG, critic_endpoints, make_config, make_groups, pack_groups, running

from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.learner.batch import Batch, Name
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.critic import Critic, CriticServer, RemoteCritic
from asyncrl.learner.distributed import Ranks
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.messages import Body
from asyncrl.wire.rpc import Connection
from asyncrl.wire.service_messages import Train, Value
from tests.helpers.relay import Direction, Relay
from tests.helpers.serving import serving


def port_of(addresses: Endpoints) -> int:
    return int(addresses.critic_ranks.rpartition("-")[2])


@pytest.fixture
def addresses(free_port: Callable[[], int]) -> Endpoints:
    return critic_endpoints(free_port())


def test_two_learner_ranks_and_one_critic_rank(
    addresses: Endpoints, one_rank: Ranks, tiny_model: Path, tmp_path: Path
) -> None:
    sections = GAE_CONFIG | {"algorithm": {**GAE_CONFIG["algorithm"], "truncated": "bootstrap"}}
    config = make_config(tiny_model, **sections, replay={"groups_per_step": 8}, launch={"learners": 2})
    groups = make_groups()
    for group, number in ((0, 1), (2, 0), (2, 3), (4, 2)):
        groups[group].trajectories[number].status = "truncated"
    batches = [pack_groups(config, groups[:4]), pack_groups(config, groups[4:])]
    local = Critic(make_config(tiny_model, **GAE_CONFIG), one_rank)
    both = pack_groups(config, groups)
    with (
        running("run_critic.py", tiny_model, tmp_path, port_of(addresses)) as process,
        ThreadPoolExecutor(2) as pool,
    ):
        ranks = [RemoteCritic(config, rank, addresses) for rank in (0, 1)]
        for step in (1, 2):
            values = list(pool.map(RemoteCritic.values, ranks, batches, [step, step]))
            expected = local.values(both, step)
            returns = torch.linspace(-1, 1, both.num_tokens)
            named = {n: (v, r) for n, v, r in rows(both, expected, returns)}
            after = values_after(both, expected)
            for batch, own in zip(batches, values, strict=True):
                own_after = values_after(batch, own)
                assert own_after == pytest.approx({name: after[name] for name in own_after}, abs=1e-5, rel=1e-4)
            assert sum(len(own) - batch.num_tokens for batch, own in zip(batches, values, strict=True)) == len(after)
            for batch, own in zip(batches, values, strict=True):
                for name, value, _ in rows(batch, own, own):
                    torch.testing.assert_close(value, named[name][0], atol=1e-5, rtol=1e-4)
            for rank, batch in zip(ranks, batches, strict=True):
                rank.train(torch.cat([named[name][1] for name, _, _ in rows(batch, batch.seq, batch.seq)]))
            local.train(returns)
            for metrics in pool.map(lambda rank: rank.finish(), ranks):
                assert metrics.pop("critic/peak_memory_bytes") > 10e6
                assert metrics == pytest.approx(local.finish(), rel=1e-3, abs=1e-6)
        list(pool.map(lambda rank: rank.save(tmp_path / "critic"), ranks))
        assert (tmp_path / "critic" / "model.safetensors").exists()
        for rank in ranks:
            rank.close()
        assert process.wait(20) == 0, (tmp_path / "run_critic.log").read_text()


def test_its_state_is_that_of_a_critic_in_the_learner(
    addresses: Endpoints, one_rank: Ranks, tiny_model: Path, tmp_path: Path
) -> None:
    config = make_config(tiny_model, **GAE_CONFIG)
    batch = pack_groups(config, make_groups(3))
    returns = torch.linspace(-1, 1, batch.num_tokens)

    def train(critic: Critic | RemoteCritic, step: int) -> torch.Tensor:
        values = critic.values(batch, step)
        critic.train(returns)
        critic.finish()
        return values

    local = Critic(config, one_rank)
    train(local, 1)
    with running("run_critic.py", tiny_model, tmp_path, port_of(addresses), "1") as process:
        critic = RemoteCritic(config, 0, addresses)
        train(critic, 1)
        checkpoints = Checkpoints(config, tmp_path / "checkpoints", one_rank, others=critic.parts)
        checkpoints.save(1, critic.snapshot, reward=None)
        expected = [train(local, step) for step in (2, 3)]
        assert all(torch.equal(train(critic, step), expected[step - 2]) for step in (2, 3))
        checkpoints.finish()
        checkpoints.close()
        folder = checkpoints.path(1)
        assert (folder / "critic_model" / "model.safetensors").exists() and checkpoints.newest() == 1
        critic.restore(folder)
        assert all(torch.equal(train(critic, step), expected[step - 2]) for step in (2, 3))
        local.restore(folder)
        assert all(torch.equal(train(local, step), expected[step - 2]) for step in (2, 3))
        (tmp_path / "checkpoints" / "step-000002.partial").write_text("no folder")
        critic.snapshot(tmp_path / "checkpoints" / "step-000002.partial")
        assert process.wait(20) == 1
    log = (tmp_path / "run_critic.log").read_text()
    assert "step-000002.partial cannot be written: [Errno 17] File exists" in log


def rows(batch, *columns):  # type: ignore[no-untyped-def]
    """Returns the name of every packed sequence and its part of each column, in order."""
    for micro in batch.micro_batches:
        for number, name in enumerate(micro.names):
            yield name, *(column[micro.span][micro.seq == number] for column in columns)


def values_after(batch: Batch, values: torch.Tensor) -> dict[Name, float]:
    """Returns the values after the last tokens of the truncated trajectories."""
    names = [name for micro in batch.micro_batches for name in micro.names]
    return {names[seq]: value for seq, value in zip(batch.ended, values[batch.num_tokens :].tolist(), strict=True)}


def test_an_error_of_the_critic_reaches_its_learners(
    addresses: Endpoints, one_rank: Ranks, tiny_model: Path, tmp_path: Path
) -> None:
    config = make_config(tiny_model, **GAE_CONFIG)
    batch = pack_groups(config, make_groups(2))
    with running("run_critic.py", tiny_model, tmp_path, port_of(addresses), "1") as process:
        critic = RemoteCritic(config, 0, addresses)
        values = critic.values(batch, 1)
        critic.train(torch.full((batch.num_tokens,), float("nan")))
        skipped = critic.finish()
        assert skipped.pop("critic/peak_memory_bytes") > 10e6
        assert skipped.keys() == {"critic/lr", "critic/skipped_updates", "critic/value_mean"}
        assert skipped["critic/skipped_updates"] == 4.0  # two epochs over two mini-batches
        assert torch.equal(critic.values(batch, 2), values)
        critic.train(torch.full((batch.num_tokens,), float("nan")))
        with pytest.raises(
            RunError, match=r"critic rank 0 refused a message: step 2: 6 updates in a row are not finite.* critic.lr"
        ):
            critic.finish()
        assert process.wait(20) == 1


@pytest.fixture
def server(addresses: Endpoints, one_rank: Ranks, tiny_model: Path, tmp_path: Path) -> Iterator[CriticServer]:
    """A critic rank in a thread that serves learner rank 0."""
    stop = threading.Event()
    critic = Critic(make_config(tiny_model, **GAE_CONFIG), one_rank)
    server = CriticServer(critic, addresses, learners=[0], run_dir=tmp_path, out_dir=tmp_path, should_stop=stop.is_set)
    with serving(server.serve, stop):
        yield server
    server.close()


@pytest.fixture
def peer(addresses: Endpoints, server: CriticServer) -> Iterator[Connection]:
    connection = Connection(addresses, addresses.critics[0], "the critic")
    yield connection
    connection.close()


TOKENS, LENGTHS, VALUED = [1, 2, 3, 4, 5], [3, 2], [0, 3]
NAMES = [(10, 0), (10, 1)]


def refusal(peer: Connection, body: Body, arrays: Sequence[np.ndarray] = ()) -> str:
    with pytest.raises(RunError, match="refused a message") as raised:
        peer.request(body, arrays, timeout_s=10)
    return str(raised.value)


@pytest.mark.parametrize(
    ("rows", "names", "minibatches", "text"),
    [
        ([[[1], [30_000_000], []]], [[(1, 0)]], [1, 0], "a row of 1 tokens does not fit to its 1 names, 1 lengths"),
        ([[TOKENS, [6, -1], VALUED]], [NAMES], [1, 0], "a row of 5 tokens does not fit"),
        ([[[], [], []]], [[]], [1, 0], "a row of 0 tokens"),
        ([[TOKENS, LENGTHS, [5]]], [NAMES], [1, 0], "a row of 5 tokens does not fit"),
        ([[[1, 48], [2], [0]]], [[(1, 0)]], [1, 0], "token 48, but the critic's vocabulary has 48"),
        ([], [NAMES], [1, 0], "1 rows need 3 frames each"),
        ([[TOKENS, LENGTHS, VALUED]], [NAMES], [2, 0], "1 rows in mini-batches of [2, 0]"),
    ],
)
def test_incomplete_rows_are_refused(
    peer: Connection, rows: list[list[Any]], names: Any, minibatches: list[int], text: str
) -> None:
    body = Value(0, 1, minibatches, names)
    assert f"value: {text}" in refusal(peer, body, [np.array(a, np.int32) for row in rows for a in row])


def test_returns_that_are_not_of_the_last_values_are_refused(
    server: CriticServer, addresses: Endpoints, tiny_model: Path
) -> None:
    config = make_config(tiny_model, **GAE_CONFIG)
    batch = pack_groups(config, make_groups(2))
    critic, count = RemoteCritic(config, 0, addresses), batch.num_tokens
    peer = critic._connection
    critic.values(batch, 1)
    for step, arrays in ((1, []), (1, [np.zeros(count, np.int32)]), (2, [np.zeros(count, np.float32)])):
        assert f"expected f4[{count}] of step 1" in refusal(peer, Train(0, step), arrays)
    critic.train(torch.zeros(count))
    assert "critic/loss" in critic.finish(), "refused messages have no effect"
    critic.close()


@pytest.mark.parametrize("lost", ["requests", "answers"])
def test_what_is_lost_with_a_connection_is_sent_again_and_done_once(
    lost: Direction, server: CriticServer, addresses: Endpoints, one_rank: Ranks, tiny_model: Path
) -> None:
    config = make_config(tiny_model, **GAE_CONFIG, launch={"progress_timeout_s": 8})
    batch = pack_groups(config, make_groups(2))
    returns = torch.linspace(-1, 1, batch.num_tokens)
    local = Critic(config, one_rank)
    expected = [local.values(batch, 1)]
    local.train(returns)
    metrics = local.finish()
    expected.append(local.values(batch, 2))
    with Relay(int(addresses.critics[0].rpartition(":")[2])) as relay, ThreadPoolExecutor(1) as pool:
        critic = RemoteCritic(config, 0, replace(addresses, critics=(relay.address,)))
        assert torch.equal(critic.values(batch, 1), expected[0])
        with relay.losing(lost):
            critic.train(returns)
        assert critic.finish()["critic/loss"] == pytest.approx(metrics["critic/loss"])
        with relay.losing(lost):
            values = pool.submit(critic.values, batch, 2)
        assert torch.equal(values.result(20), expected[1]), "trained once"
        critic.close()


def test_old_requests_that_come_again_are_not_answered(
    server: CriticServer, addresses: Endpoints, tiny_model: Path
) -> None:
    config = make_config(tiny_model, **GAE_CONFIG)
    batch = pack_groups(config, make_groups(2))
    critic = RemoteCritic(config, 0, addresses)
    critic.values(batch, 1)
    critic.train(torch.zeros(batch.num_tokens))
    critic.finish()
    peer = critic._connection
    peer.send(Train(0, 1), [np.zeros(batch.num_tokens, np.float32)], seq=1)
    assert peer.receive(0.5) is None
    peer.send(Train(0, 1), [np.zeros(batch.num_tokens, np.float32)], seq=2)
    answer = peer.receive(10.0)
    assert answer is not None and (answer.kind, answer.seq) == ("Trained", 2)
    assert len(critic.values(batch, 2)) == batch.num_tokens
    critic.close()


def test_a_missing_critic_is_named(addresses: Endpoints, tiny_model: Path) -> None:
    config = make_config(tiny_model, **GAE_CONFIG, launch={"progress_timeout_s": 0.3})
    critic = RemoteCritic(config, 0, addresses)
    with pytest.raises(PeerTimeoutError, match=r"critic rank 0 at tcp://127.0.0.1:\d+ did not answer 'Value' within"):
        critic.values(pack_groups(config, make_groups(1)), 1)
    critic.close()
