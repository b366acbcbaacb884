"""The number of restarts of a role and the pauses before them. The tests start no processes and set the time."""

from __future__ import annotations

from asyncrl.launch.placement import RoleResources
from asyncrl.launch.supervisor import RestartHistory, RoleGroup
from asyncrl.launch.worker import RoleSpec
from tests.helpers.replay import loopback_endpoints


def test_pauses_grow_and_reset_after_a_working_start() -> None:
    history = RestartHistory(max_restarts=100, window_s=10_000)
    assert [history.next(10.0 * n, settled=False) for n in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert history.next(100.0, settled=True) == 0
    assert history.next(110.0, settled=False) == 1
    assert history.total == 10


def test_more_than_allowed_within_the_window_is_refused() -> None:
    history = RestartHistory(max_restarts=3, window_s=60)
    assert [history.next(t, settled=True) for t in (0.0, 10.0, 20.0)] == [0, 0, 0]
    assert history.next(30.0, settled=True) is None
    assert history.total == 3
    later = RestartHistory(max_restarts=3, window_s=60)
    assert [later.next(t, settled=True) for t in (0.0, 10.0, 20.0, 61.0, 71.0)] == [0] * 5


def test_one_that_never_works_ends_however_slowly_it_fails() -> None:
    history = RestartHistory(max_restarts=3, window_s=60)
    assert [history.next(1000.0 * n, settled=False) for n in range(4)] == [0, 1, 2, None]


def test_zero_restarts_nothing() -> None:
    assert RestartHistory(max_restarts=0, window_s=60).next(0.0, settled=True) is None


def test_a_reward_model_that_worked_long_starts_with_a_new_count() -> None:
    spec = RoleSpec("reward_model", 0, "runs/run", loopback_endpoints(1), (0,), 8)
    group = RoleGroup(
        "reward_model", [(spec, RoleResources((0,), threads=1))], RestartHistory(max_restarts=3, window_s=600)
    )
    for day in range(12):
        group.started_s = 86_400.0 * day
        assert group.delay_s(group.started_s + 80_000.0) == 0
