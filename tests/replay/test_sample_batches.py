"""Batches out of a file of samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import DataError
from asyncrl.observe.samples import Samples
from asyncrl.replay.codec import pack_group
from asyncrl.replay.history import SampleBatches
from asyncrl.types import Group, Lease, Prompt
from tests.helpers.replay import make_group


def group(ticket: int, *, reward: float = 0.0) -> Group:
    prompt = Prompt(ticket + 10, np.arange(3, dtype=np.int32), "1", "test")
    made = make_group(Lease(ticket, 0, prompt), 0, completion_tokens=(2 + ticket, 3))
    for member in made.trajectories:
        member.reward = reward
    return made


def saved(path: Path, steps: dict[int, list[Group]]) -> Path:
    Samples.concat([Samples.of_groups(groups, step=step, outcome="trained") for step, groups in steps.items()]).save(
        path
    )
    return path


STEPS = {3: [group(5, reward=1.0), group(4)], 4: [group(6), group(8)]}


def test_the_groups_of_a_step_are_dealt_to_the_ranks(tmp_path: Path) -> None:
    file = saved(tmp_path / "samples.parquet", STEPS)
    one, ranks = SampleBatches(file, 0, ranks=1), [SampleBatches(file, rank, ranks=2) for rank in (0, 1)]
    assert [batches.begin(step) for batches in (one, *ranks) for step in (2, 3)] == [4] * 6
    for step, groups in STEPS.items():
        shard = one.take(step)
        assert shard is not None
        assert shard.step == step
        assert [pack_group(found)[0] for found in shard.groups] == [pack_group(want)[0] for want in groups]
        dealt = [batches.take(step) for batches in ranks]
        assert sorted(part.groups[0].ticket for part in dealt if part) == sorted(want.ticket for want in groups)
    assert one.commit(3, {}).metrics == {"reward/mean": 0.5}
    assert one.take(5) is None
    assert list(one.evaluations(lambda: False)) == []


@pytest.mark.parametrize("step", [0, 1, 4])
def test_the_first_step_must_be_in_the_file(tmp_path: Path, step: int) -> None:
    batches = SampleBatches(saved(tmp_path / "samples.parquet", STEPS), 0, ranks=1)
    with pytest.raises(DataError, match=rf"has steps 3 to 4, and the first one to train is {step + 1}; .* --start 2 "):
        batches.begin(step)


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "samples.parquet"
    Samples.of_groups([group(1)], outcome="zero_variance").save(file)
    with pytest.raises(DataError, match="2 rows have no step; leave them out, or set it"):
        SampleBatches(file, 0, ranks=1)
    Samples.concat([]).save(file)
    with pytest.raises(DataError, match="has no rows to train"):
        SampleBatches(file, 0, ranks=1)
    batches = SampleBatches(saved(file, {1: [group(1)], 3: [group(2)]}), 0, ranks=1)
    with pytest.raises(DataError, match="step 2 has 0 groups; each step needs at least one"):
        batches.take(2)
    with pytest.raises(DataError, match=r"step 1 has 1 groups; .* a multiple of launch.learners = 2"):
        SampleBatches(file, 0, ranks=2).take(1)
    file.write_text("no Parquet")
    with pytest.raises(DataError, match="not a file of samples"):
        SampleBatches(file, 0, ranks=1)
