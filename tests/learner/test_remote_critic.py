"""A critic in a process of its own gives what one in the learner's process gives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from worlds import GAE_CONFIG, endpoints, make_config, make_groups, pack_groups, running

from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.learner.critic import Critic
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.remote_critic import RemoteCritic
from asyncrl.learner.saving import Checkpoints
from asyncrl.types import Endpoints


@pytest.fixture
def addresses(free_port: Callable[[], int]) -> Endpoints:
    port = free_port()
    return replace(endpoints(port), critics=(("127.0.0.1", port), ("127.0.0.1", port + 1)))


def test_two_learner_ranks_and_one_critic_rank(
    addresses: Endpoints, one_rank: Ranks, tiny_model: Path, tmp_path: Path
) -> None:
    config = make_config(tiny_model, **GAE_CONFIG, replay={"groups_per_step": 8}, launch={"learners": 2})
    groups = make_groups()
    batches = [pack_groups(config, groups[:4]), pack_groups(config, groups[4:])]
    local = Critic(make_config(tiny_model, **GAE_CONFIG), one_rank)
    both = pack_groups(config, groups)
    with (
        running("run_critic.py", tiny_model, tmp_path, addresses.critics[0][1]) as process,
        ThreadPoolExecutor(2) as pool,
    ):
        ranks = [RemoteCritic(config, rank, addresses) for rank in (0, 1)]
        for step in (1, 2):
            values = list(pool.map(RemoteCritic.values, ranks, batches, [step, step]))
            expected = local.values(both, step)
            returns = torch.linspace(-1, 1, both.num_tokens)
            named = {n: (v, r) for n, v, r in rows(both, expected, returns)}
            for batch, own in zip(batches, values, strict=True):
                for name, value, _ in rows(batch, own, own):
                    torch.testing.assert_close(value, named[name][0], atol=1e-5, rtol=1e-4)
            for rank, batch in zip(ranks, batches, strict=True):
                rank.train(torch.cat([named[name][1] for name, _, _ in rows(batch, batch.seq, batch.seq)]))
            local.train(returns)
            for metrics in pool.map(lambda rank: rank.finish(), ranks):
                assert metrics == pytest.approx(local.finish(), rel=1e-3, abs=1e-6)
        list(pool.map(lambda rank: rank.save(tmp_path / "critic"), ranks))
        assert (tmp_path / "critic" / "model.safetensors").exists()
        for rank in ranks:
            rank.close()
        assert process.wait(timeout=20) == 0, (tmp_path / "run_critic.log").read_text()


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
    with running("run_critic.py", tiny_model, tmp_path, addresses.critics[0][1], "1") as process:
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
        critic.snapshot(Path("/dev/null/step-000002.partial"))
        assert process.wait(timeout=20) == 1
    log = (tmp_path / "run_critic.log").read_text()
    assert "the checkpoint /dev/null/step-000002.partial cannot be written: [Errno 20] Not a directory" in log


def rows(batch, *columns):  # type: ignore[no-untyped-def]
    """Name and part of each column of every packed sequence, in order."""
    for micro in batch.micro_batches:
        for number, name in enumerate(micro.names):
            yield name, *(column[micro.span][micro.seq == number] for column in columns)


def test_an_error_of_the_critic_reaches_its_learners(
    addresses: Endpoints, one_rank: Ranks, tiny_model: Path, tmp_path: Path
) -> None:
    config = make_config(tiny_model, **GAE_CONFIG)
    batch = pack_groups(config, make_groups(2))
    with running("run_critic.py", tiny_model, tmp_path, addresses.critics[0][1], "1") as process:
        critic = RemoteCritic(config, 0, addresses)
        critic.values(batch, 1)
        critic.train(torch.full((batch.num_tokens,), float("nan")))
        with pytest.raises(
            RunError, match=r"critic rank 0 refused a message: step 1: the loss of ticket .* not finite"
        ):
            critic.finish()
        assert process.wait(timeout=20) == 1


def test_a_critic_that_is_not_there_is_named(addresses: Endpoints, tiny_model: Path) -> None:
    config = make_config(tiny_model, **GAE_CONFIG, launch={"progress_timeout_s": 0.3})
    critic = RemoteCritic(config, 0, addresses)
    with pytest.raises(PeerTimeoutError, match=r"critic rank 0 at tcp://127.0.0.1:\d+ did not answer 'value' within"):
        critic.values(pack_groups(config, make_groups(1)), 1)
    critic.close()
