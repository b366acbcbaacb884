"""The simulator against the published throughput of another system."""

from __future__ import annotations

import pytest

from asyncrl.plan.simulation import simulate
from asyncrl.plan.workload import EngineCost, LearnerCost, Lengths, Setup, SyncCost, Workload

AREAL = {0: 27.1, 1: 47.8, 2: 47.8, 4: 49.0, 8: 51.5, 16: 52.0}
"""Thousand tokens/s by the staleness limit: arXiv:2505.24298, table 7 (8 GPUs, 1.5B, completions of 8k at most)."""
GENERATORS, LEARNERS = 6, 2
"""The published split, 75 : 25."""
GROUPS, GROUP_SIZE, RUNNING_GROUPS = 64, 16, 2
"""An eighth of the published batch, and slots for a fifth of it in all generators together."""
STEP_S, BASE = 0.02, 0.3
"""Time of an engine step with all slots in use, and the fraction of it that does not depend on their number."""
LEARNER_OF_GENERATORS = 1.1
"""Time of the learners for a batch, as a fraction of the generators' time at full rate."""
LENGTHS = Lengths.log_normal(mean_tokens=2500, sigma=0.9, max_tokens=8192, group_size=GROUP_SIZE, prompt_tokens=200)


def workload() -> Workload:
    places = RUNNING_GROUPS * GROUP_SIZE
    engine = EngineCost(STEP_S * BASE, STEP_S * (1 - BASE) / places)
    tokens = float(LENGTHS.completions.mean()) * GROUP_SIZE * GROUPS
    generating_s = tokens / (GENERATORS * places / STEP_S)
    prompts = float(LENGTHS.prompts.mean()) * GROUP_SIZE * GROUPS
    learner = LearnerCost(0.0, LEARNERS * LEARNER_OF_GENERATORS * generating_s / (tokens + prompts))
    return Workload(LENGTHS, engine, learner, SyncCost(0.3, 0.3, 0.3))


def test_the_jump_at_one_and_the_plateau_after_it() -> None:
    found = {
        limit: simulate(
            workload(),
            Setup(
                generators=GENERATORS, learners=LEARNERS, max_staleness=limit, groups_per_step=GROUPS,
                group_size=GROUP_SIZE, max_running_groups=RUNNING_GROUPS, steps=24,
            ),
        ).tokens_per_s
        for limit in AREAL
    }  # fmt: skip
    scale = sum(AREAL[limit] / found[limit] for limit in AREAL) / len(AREAL)
    for limit, published in AREAL.items():
        assert found[limit] * scale == pytest.approx(published, rel=0.1), limit
