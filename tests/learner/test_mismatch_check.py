"""Engine against learner on tokens that both have scored with the same weights: models that agree are trained, all
others are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from structlog.testing import capture_logs
from worlds import make_config, make_groups, make_trainer, pack_groups

from asyncrl.errors import ConfigError
from asyncrl.learner.batch import MicroBatch, empty_micro_batch, make_batch
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.model_checks import ENOUGH_TOKENS, LIMITS, MismatchCheck
from asyncrl.learner.step import Trainer
from asyncrl.types import Group

STEP = 8
ALONE = Ranks(0, 1, torch.device("cpu"))


def make_check(ranks: Any = ALONE, **sections: Any) -> MismatchCheck:
    return MismatchCheck(make_config(Path("it"), **sections), cast(Ranks, ranks), "gpt_neox")


def fresh_row(version: int = STEP - 1) -> MicroBatch:
    groups = make_groups(12)
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.versions[trajectory.action_mask] = version
    (micro,) = make_batch(groups, tokens_per_microbatch=10_000).micro_batches
    assert len(micro.targets) > 2 * ENOUGH_TOKENS
    return micro


def looked(check: MismatchCheck, micro: MicroBatch, difference: float) -> MismatchCheck:
    signs = torch.where(torch.arange(len(micro.targets)) % 2 == 0, 1.0, -1.0)
    check.add(micro, micro.behavior_logprobs + difference * signs, version=STEP - 1)
    return check


@pytest.mark.parametrize("dtype", LIMITS)
def test_differences_beyond_rounding_are_refused(dtype: str) -> None:
    limit = LIMITS[dtype] / 0.7  # 0.7 is the temperature
    sections = {"model": {"dtype": dtype}}
    assert looked(make_check(**sections), fresh_row(), 0.9 * limit).conclude(STEP)
    with pytest.raises(ConfigError) as caught:
        looked(make_check(**sections), fresh_row(), 1.1 * limit).conclude(STEP)
    text = str(caught.value)
    for part in ("model.path = 'it'", "of type gpt_neox", f"differ by {1.1 * limit:.2g} nats on average",
                 f"rounding in {dtype} explains at most {limit:.2g}", "docs/models.md"):  # fmt: skip
        assert part in text


def test_engines_configured_to_round_more_cause_a_warning() -> None:
    for options, warns in (({"quantization": "fp8"}, True), ({"kv_cache_dtype": "fp8"}, True),
                           ({"kv_cache_dtype": "auto", "enforce_eager": True}, False)):  # fmt: skip
        check = looked(make_check(generator={"engine_options": options}), fresh_row(), 1.0)
        if not warns:
            with pytest.raises(ConfigError):
                check.conclude(STEP)
            continue
        with capture_logs() as logs:
            assert check.conclude(STEP)
        (event,) = logs
        ((name, value),) = options.items()
        assert event["log_level"] == "warning" and f"generator.engine_options {name}={value}" in event["event"]


def test_only_trajectories_completely_of_the_learners_version_count() -> None:
    """In other trajectories even the tokens of this version have a context computed with older weights."""
    micro = fresh_row()
    for number in micro.seq.unique().tolist()[1:]:
        micro.versions[(micro.seq == number).nonzero()[0]] -= 1
    check = make_check()
    for _ in range(100):
        looked(check, micro, 0.0)
        check.add(micro, torch.where(micro.seq == 0, micro.behavior_logprobs, 5.0), version=STEP - 1)
    assert check.conclude(STEP)
    check = looked(make_check(), fresh_row(STEP - 2), 5.0)
    assert not check.conclude(STEP)


def test_it_waits_for_enough_tokens() -> None:
    (group,) = make_groups(1)
    one = replace(group, trajectories=group.trajectories[:1])
    (micro,) = make_batch([one], tokens_per_microbatch=10_000).micro_batches
    micro.versions[:] = STEP - 1
    check = make_check()
    concluded_after = 0
    for step in range(1, 100):
        check.add(empty_micro_batch(), torch.zeros(0), version=STEP - 1)
        if looked(check, micro, 0.0).conclude(step):
            concluded_after = step
            break
    assert concluded_after == -(-ENOUGH_TOKENS // len(micro.targets)) > 1


def scored(trainer: Trainer, groups: list[Group], version: int) -> list[Group]:
    """Returns the groups with the log-probs of an engine that computes the same as the learner."""
    by_name = {(g.ticket, n): t for g in groups for n, t in enumerate(g.trajectories)}
    for micro in pack_groups(trainer.config, groups).micro_batches:
        logprobs = trainer.policy.logprobs(micro)
        for number, name in enumerate(micro.names):
            trajectory = by_name[name]
            trajectory.behavior_logprobs[trajectory.action_mask] = logprobs[micro.seq == number].numpy()
            trajectory.versions[trajectory.action_mask] = version
    return groups


PPO: dict[str, Any] = {
    "algorithm": {"loss": "ppo_clip", "proximal": "recompute"},
    "learner": {"epochs": 2, "minibatches": 2, "lr": 0.05},
}
"""Settings whose later updates move the policy far from the engine's weights."""


@pytest.mark.parametrize("sections", [{}, PPO], ids=["one update", "epochs and mini-batches"])
def test_a_trainer_checks_its_first_step(one_rank: Ranks, tiny_model: Path, sections: dict[str, Any]) -> None:
    def trainer() -> Trainer:
        made = make_trainer(make_config(tiny_model, **sections), one_rank)
        made.mismatch_check = MismatchCheck(made.config, one_rank, "qwen2")
        return made

    right = trainer()
    with capture_logs() as logs:
        right.train(pack_groups(right.config, scored(right, make_groups(6), 0)), step=1)
    assert right.mismatch_check is None
    (event,) = [event for event in logs if event["event"] == "engine and learner agree"]
    assert event["mean_difference_nats"] < 1e-5 and event["step"] == 1
    right.train(pack_groups(right.config, make_groups(6)), step=2)

    wrong = trainer()
    groups = scored(wrong, make_groups(6), 0)
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.behavior_logprobs[trajectory.action_mask] -= 0.1
    with pytest.raises(ConfigError, match="a model of type qwen2 differently from the learner"):
        wrong.train(pack_groups(wrong.config, groups), step=1)
