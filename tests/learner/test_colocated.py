"""Generator and learner on one card, as loops around a fake one: never two at a time, in the order of the turns,
whoever dies where."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.colocate import GeneratorTurn, HostMemory, LearnerTurn
from asyncrl.config.config import Config
from asyncrl.learner.distributed import Ranks
from tests.helpers.colocated import BYTES, FakeCard, FakeLock, World

GENERATES = ["generator", "wake weights", "swap", "wake cache", "sleep", "release"]


def config_of(*, staleness: int, steps: int = 6, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"path": "none"},
        "data": {"train": "none.parquet"},
        "generator": {"group_size": 2, "max_running_groups": 3},
        "replay": {"groups_per_step": 2, "max_staleness": staleness},
        "launch": {"colocate": "on"},
        "steps": steps,
    }
    return Config.model_validate(values | sections)


def run(tmp_path: Path, config: Config, dies: tuple[str, str, int] | None = None) -> World:
    world = World(config, tmp_path, dies)
    world.run()
    queue = world.queue
    assert queue.steps == config.steps and queue.done
    trained = [ticket for step in range(1, config.steps + 1) for ticket in queue.batches[step]]
    assert len(set(trained)) == len(trained) == config.steps * config.replay.groups_per_step
    assert all(0 <= one <= config.replay.max_staleness for one in world.staleness)
    assert world.card.peak == 2 * BYTES, "the other has left the card"
    assert not queue.dropped or world.deaths, "a version was not evaluated"
    return world


def test_the_turns_have_their_order(tmp_path: Path) -> None:
    world = run(tmp_path, config_of(staleness=0))
    learner, last = ["learner", "reload", "train", "send", "offload", "release"], ["reload", "train", "save", "offload"]
    assert world.turns() == [GENERATES, learner] * 5 + [GENERATES, ["learner", *last, "release"]]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_learner_trains_until_no_batch_is_left(staleness: int, tmp_path: Path) -> None:
    world = run(tmp_path, config_of(staleness=staleness, steps=8))
    trained = [turn.count("train") for turn in world.turns() if turn[0] == "learner"]
    assert sum(trained) == 8
    assert max(1, staleness) <= max(trained) <= staleness + 1
    assert world.queue.order[:2] == ["sent 0", "loaded 0"]


def test_an_evaluated_version_is_loaded_and_evaluated_before_the_next(tmp_path: Path) -> None:
    data = {"train": "none.parquet", "eval": "none.parquet"}
    config = config_of(staleness=3, steps=8, data=data, eval={"every_steps": 2, "samples": 1})
    world = run(tmp_path, config)
    order = [event for event in world.queue.order if event.startswith("evaluated")]
    assert order == [f"evaluated {version}" for version in (0, 2, 4, 6, 8)]
    for version in (2, 4, 6, 8):
        place = world.queue.order.index(f"loaded {version}")
        assert world.queue.order[place + 1] == f"evaluated {version}", world.queue.order


DEATHS = [
    *(("generator", event, 3) for event in ("acquire", "wake weights", "swap", "wake cache", "step", "sleep")),
    ("generator", "acquire", 1),
    ("generator", "sleep", 1),
    *(("learner", event, 2) for event in ("acquire", "reload", "train", "send", "offload")),
    ("learner", "acquire", 1),
    ("learner", "send", 1),
    ("learner", "save", 1),
]


@pytest.mark.parametrize("dies", DEATHS, ids=lambda dies: f"{dies[0]}-{dies[1].replace(' ', '-')}-{dies[2]}")
def test_a_role_that_dies_in_its_turn_starts_again(dies: tuple[str, str, int], tmp_path: Path) -> None:
    data = {"train": "none.parquet", "eval": "none.parquet"}
    evaluation = {"every_steps": 3, "samples": 1}
    world = run(tmp_path, config_of(staleness=1, data=data, eval=evaluation), dies)
    assert world.deaths == 1


class Phases:
    """An engine, and a trainer with two tensors, on one card."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weight, self.moment = torch.ones(4), torch.ones(4)

    def sleep(self, level: int) -> None:
        self.calls.append("sleep")

    def wake(self, part: str) -> None:
        self.calls.append(f"wake {part}")

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight, self.moment]


def test_weights_are_handed_over_before_the_learner_leaves_the_card(tmp_path: Path) -> None:
    config = config_of(staleness=0, weights={"transport": "ipc", "staging": "buckets"})
    card, roles = FakeCard(), Phases()
    locks: list[Any] = [FakeLock(card, "generator"), FakeLock(card, "learner")]
    assert locks[0].try_acquire()
    generator = GeneratorTurn(config, roles, [locks[0]])
    learner = LearnerTurn(config, Ranks(0, 1, torch.device("cpu")), locks[1])
    learner._memory = HostMemory(torch.device("cpu"), always=True)
    learner.holds(roles, 0)
    assert not generator.can_load(SimpleNamespace(round=lambda: None)), "no version comes"  # type: ignore[arg-type]
    (sent,) = learner.make_room([("w", roles.weight)])
    assert (sent[1].untyped_storage().nbytes(), roles.moment.untyped_storage().nbytes()) == (16, 0)
    assert generator.can_load(SimpleNamespace(round=object))  # type: ignore[arg-type]
    generator.wake_weights()
    generator.give_up()  # the version did not come
    assert not card.visitor and roles.calls == ["sleep", "wake weights", "sleep"]
    generator.wake_weights()
    generator.woken()
    assert generator.asleep and card.visitor == "generator" and card.holder == "learner"
    learner.end(lambda: None)
    assert roles.weight.untyped_storage().nbytes() == 0 and not card.holder
    generator.woken()
    assert not generator.asleep and card.holder == "generator" and not card.visitor
    assert roles.calls[-2:] == ["wake weights", "wake cache"]
