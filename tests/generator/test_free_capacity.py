"""The numbers of groups and evaluation prompts that a generator asks for."""

from __future__ import annotations

import pytest
from generator_model import small_config

from asyncrl.generator.groups import free_capacity


@pytest.mark.parametrize(("running", "groups"), [(0, 18), (16, 10), (31, 2), (32, 2), (33, 1), (35, 0), (36, 0)])
def test_an_eighth_more_groups_than_run_wait_in_the_engine(model_path: str, running: int, groups: int) -> None:
    config = small_config(model_path, generator__max_running_groups=16)  # of 2
    assert free_capacity(config, running=running, evaluating=None, denied=False) == (groups, 0)


def test_evaluation_gets_half_of_the_places_and_none_of_those_that_wait(model_path: str) -> None:
    config = small_config(model_path, generator__max_running_groups=16, eval__samples=4)
    assert free_capacity(config, running=0, evaluating=0, denied=False) == (10, 4)
    assert free_capacity(config, running=36, evaluating=16, denied=False) == (0, 0)
    assert free_capacity(config, running=16, evaluating=16, denied=True) == (2, 4)
