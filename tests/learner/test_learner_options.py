"""The learning rate, and algorithm settings: rejected values, and the arguments of the functions."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import make_config

from asyncrl.algorithms.losses import PolicyTerms, decoupled_ppo, ppo_clip
from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.config.sections import ReplayConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.algorithm import (
    check_algorithm,
    is_group_relative,
    make_algorithm,
)
from asyncrl.learner.model.loading import deepspeed_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def make(generator: dict[str, Any] | None = None, critic: dict[str, Any] | None = None, **settings: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "d"},
            "generator": generator or {},
            "critic": critic or {},
            "algorithm": settings,
        }
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"advantage": "grop"}, "algorithm.advantage = 'grop': not one of "),
        ({"loss": "zzz"}, "algorithm.loss = 'zzz': not one of ppo_clip, decoupled_ppo, reinforce_is"),
        ({"loss": "no_such_module:loss"}, "algorithm.loss = 'no_such_module:loss': cannot import no_such_module"),
        ({"loss": "math:los"}, "algorithm.loss = 'math:los': math has no 'los'"),
        (
            {"loss_options": {"clip_hihg": 0.3}},
            "algorithm.loss_options.clip_hihg = 0.3: ppo_clip has no such option; did",
        ),
        (
            {"loss_options": {"dual_clip": True}},
            "algorithm.loss_options.dual_clip = True: input should be a valid number",
        ),
        (
            {"loss": "cispo", "loss_options": {"clip_high": -2.0}},
            "algorithm.loss_options.clip_high = -2.0: input should be greater than or equal to 0",
        ),
        (
            {"loss_options": {"dual_clip": math.nan}},
            "algorithm.loss_options.dual_clip = nan: input should be greater than 1",
        ),
        (
            {"advantage_options": {"eps": -1e-6}},
            "algorithm.advantage_options.eps = -1e-06: input should be greater than or equal to 0",
        ),
        (
            {"loss": "decoupled_ppo", "loss_options": {"correction": None}},
            "algorithm.loss_options.correction = None: decoupled_ppo has no such option; there are clip_low, clip_high",
        ),
        ({"generator": {"group_size": 1}}, "generator.group_size = 1: algorithm.advantage = 'grpo' compares"),
        ({"critic": {"ranks": 1}}, "critic.ranks = 1: algorithm.advantage = 'grpo' has no critic"),
        ({"correction": {"mode": "mask"}}, "algorithm.correction.mode = 'mask': algorithm.loss = 'ppo_clip' has no"),
        (
            {"loss": "cispo", "proximal": "loglinear"},
            "algorithm.proximal = 'loglinear': algorithm.loss = 'cispo' takes no",
        ),
        ({"reference": "ref"}, "algorithm.reference = 'ref': nothing measures the divergence from it"),
        ({"truncated": "bootstrap"}, "algorithm.truncated = 'bootstrap': algorithm.advantage = 'grpo' takes no value"),
        (
            {"kl_estimator": "k1", "kl_loss_coef": 0.1},
            "algorithm.kl_estimator = 'k1': its gradient in the loss is zero",
        ),
    ],
)
def test_settings_that_are_wrong_or_contradict_one_another_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_algorithm(make(**settings))
    assert str(raised.value).startswith(text)


def terms() -> PolicyTerms:
    columns = ([-1.0, -2.0, -0.5], [-1.1, -1.8, -0.6], [-2.5, -1.0, -0.7], [1.0, 1.0, -1.0])
    return PolicyTerms(*(torch.tensor(c) for c in columns), seq=torch.tensor([0, 0, 1]))


def test_losses_get_the_policies_they_name_and_their_options() -> None:
    given = terms()
    loss = make_algorithm(make(loss="ppo_clip", loss_options={"clip_high": 0.1})).loss
    torch.testing.assert_close(
        loss(given), ppo_clip(given.logprobs, given.behavior_logprobs, given.advantages, clip_high=0.1)
    )
    correction = {"level": "geometric", "mode": "mask", "low": 0.5, "high": None}
    algorithm = make_algorithm(make(loss="decoupled_ppo", correction=correction, loss_options={"dual_clip": None}))
    arguments = [given.logprobs, given.proximal_logprobs, given.behavior_logprobs, given.advantages, given.seq]
    expected = decoupled_ppo(*arguments, correction=correction, dual_clip=None)
    torch.testing.assert_close(algorithm.loss(given), expected)


def test_advantage_and_aggregation_get_their_options() -> None:
    algorithm = make_algorithm(make(advantage_options={"eps": 1.0}, aggregation="seq-mean-token-sum-norm"))
    rewards, group = torch.tensor([0.0, 2.0]), torch.tensor([0, 0])
    advantages = algorithm.advantage({"rewards": rewards, "group": group, "seq": group}, reduce=lambda x: x)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0]) / (2**0.5 + 1))
    assert algorithm.per_sequence and not algorithm.per_token and not algorithm.needs_critic
    loss = algorithm.aggregate(torch.ones(4), torch.tensor([0, 0, 0, 1]), num_tokens=4, num_sequences=2)
    assert float(loss) == pytest.approx(4 / (2 * 512))


def test_functions_of_other_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = ModuleType("outside")

    def squared(logprobs: Tensor, advantages: Tensor, *, power: float = 2.0) -> Tensor:
        return -advantages * logprobs.abs() ** power

    def needs_more(logprobs: Tensor, values: Tensor) -> Tensor:
        return logprobs * values

    outside.squared, outside.needs_more = squared, needs_more  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "outside", outside)
    loss = make_algorithm(make(loss="outside:squared", loss_options={"power": 3})).loss
    given = terms()
    torch.testing.assert_close(loss(given), squared(given.logprobs, given.advantages, power=3))
    with pytest.raises(ConfigError, match="its parameter values is not one of logprobs, proximal_logprobs"):
        check_algorithm(make(loss="outside:needs_more"))


@pytest.mark.parametrize("where", ["user_functions", "user_functions.py"])
def test_functions_of_the_working_directory(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_functions.py").write_text(
        "def my_loss(logprobs, advantages): return -logprobs * advantages\n"
        "def my_advantage(rewards, values): return rewards - values, rewards\n"
        "def both(rewards, group, values): return rewards - values, rewards\n"
        "def ranked(rewards, group): return rewards\n"
        "LIMIT = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "user_functions", raising=False)
    advantage, loss = check_algorithm(make(advantage=f"{where}:my_advantage", loss=f"{where}:my_loss"))
    assert loss(torch.tensor(2.0), torch.tensor(3.0)) == -6
    assert not is_group_relative(advantage), "groups with equal rewards are trained"
    names = ("both", "ranked")
    both, ranked = (check_algorithm(make(advantage=f"{where}:{name}"))[0] for name in names)
    assert not is_group_relative(both) and is_group_relative(ranked)
    for name, text in (("LIMIT", "is a int, not a function"), ("my_los", "no 'my_los'; did you mean my_loss?")):
        with pytest.raises(ConfigError, match=text):
            check_algorithm(make(loss=f"{where}:{name}"))


def test_groups_are_dropped_only_where_equal_rewards_have_no_signal() -> None:
    dropping = ReplayConfig(zero_variance="drop")
    check_algorithm(make().model_copy(update={"replay": dropping}))
    with pytest.raises(ConfigError, match=r"'drop': groups with equal rewards have a training signal .* = 'gae'"):
        check_algorithm(make(advantage="gae").model_copy(update={"replay": dropping}))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_name_algorithms_that_work(path: Path) -> None:
    config = load_config(path)
    assert make_algorithm(config).needs_critic == (config.algorithm.advantage == "gae")


def test_options_of_deepspeed_override_those_of_the_learner(tiny_model: Path) -> None:
    options = {"zero_optimization": {"overlap_comm": True}, "wall_clock_breakdown": True}
    plain = deepspeed_config(make_config(tiny_model), nn.Identity())
    settings = deepspeed_config(make_config(tiny_model, learner={"deepspeed_options": options}), nn.Identity())
    assert settings["wall_clock_breakdown"] is True
    assert settings["zero_optimization"] == plain["zero_optimization"] | {"overlap_comm": True}
    assert settings["data_types"] == plain["data_types"]
