"""Generator and learner on one card, as loops around a fake one: never two at a time, in the order of the turns,
whoever dies where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.config import Config
from tests.helpers.colocated import BYTES, World
from tests.helpers.hand_over import HandOverWorld

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


def run(tmp_path: Path, config: Config, dies: tuple[str, str, int] | None = None, *, failures: int = 0) -> World:
    world = (HandOverWorld if config.hands_over else World)(config, tmp_path, dies)
    if isinstance(world, HandOverWorld):
        world.failures = failures
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


IPC = {"transport": "ipc", "staging": "buckets"}


def test_weights_are_handed_over_before_the_learner_leaves_the_card(tmp_path: Path) -> None:
    world = run(tmp_path, config_of(staleness=0, steps=4, weights=IPC))
    passes = ["offload", "send"]
    loads = ["wake weights", "hand over", "load", "swap", "offload", "release"]
    learner, generator = (
        ["learner", "reload", "train", *passes, *loads],
        ["generator", "wake cache", "sleep", "release"],
    )
    last = ["learner", "reload", "train", "save", "offload", "release"]
    turns = world.turns()
    if turns[0] == ["learner", "reload", *passes, *loads]:
        del turns[0]  # the generator was not there for the first version
    assert turns == [*[generator, learner] * 3, generator, last]


def test_a_version_that_was_not_handed_over_is_handed_over_again(tmp_path: Path) -> None:
    data = {"train": "none.parquet", "eval": "none.parquet"}
    evaluation = {"every_steps": 2, "samples": 1}
    world = run(tmp_path, config_of(staleness=1, weights=IPC, data=data, eval=evaluation), failures=2)
    generator = [event for role, event in world.card.events if role == "generator" and event != "step"]
    first = generator.index("load")
    # Memory that was taken for a version that did not come is free before the learner needs the card.
    assert generator[first - 1 : first + 4] == ["wake weights", "load", "sleep", "wake weights", "load"]
    order = [event for event in world.queue.order if event.startswith("evaluated")]
    assert order == [f"evaluated {version}" for version in (0, 2, 4, 6)]


HANDING_DEATHS = [
    ("generator", "load", 2),
    ("generator", "wake cache", 2),
    ("learner", "hand over", 2),
    ("learner", "offload", 4),
]


@pytest.mark.parametrize(
    ("staleness", "dies"),
    [
        *((0, one) for one in HANDING_DEATHS),
        *(pytest.param(2, one, marks=pytest.mark.slow) for one in HANDING_DEATHS),
    ],
    ids=lambda one: str(one) if isinstance(one, int) else f"{one[0]}-{one[1].replace(' ', '-')}-{one[2]}",
)
def test_whoever_dies_in_a_hand_over_gets_its_turn_again(
    staleness: int, dies: tuple[str, str, int], tmp_path: Path
) -> None:
    data = {"train": "none.parquet", "eval": "none.parquet"}
    evaluation = {"every_steps": 3, "samples": 1}
    world = run(tmp_path, config_of(staleness=staleness, weights=IPC, data=data, eval=evaluation), dies)
    assert world.deaths == 1
