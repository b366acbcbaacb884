"""The limit that falls while the bound on divergence holds the learning rate down."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncrl.errors import ConfigError
from asyncrl.replay.ledger import FRACTION, ControllerState, Ledger, StalenessController
from asyncrl.util.durable import of_bytes, restore, to_bytes
from tests.helpers.replay import small_config


def run(
    control: StalenessController, limit: int, steps: int, fraction: Callable[[int], float], *, reached: bool = True
) -> list[int]:
    """Returns the limit of each step; `fraction` returns the fraction of the learning rate at a limit."""
    seen: list[int] = []
    for _ in range(steps):
        limit = control.next(limit, {FRACTION: fraction(limit), "staleness/max": float(limit if reached else 0)})
        seen.append(limit)
    return seen


def share(distance: float) -> Callable[[int], float]:
    """The fraction of the learning rate if `distance` steps at the full rate are within the bound."""
    return lambda limit: min(1.0, distance / limit)


def test_it_falls_until_half_of_the_learning_rate_is_left_and_stays() -> None:
    assert run(StalenessController(low=1, high=8), 8, 120, share(2.0))[-30:] == [4] * 30
    assert run(StalenessController(low=1, high=8), 8, 120, share(0.1))[-1] == 1
    assert run(StalenessController(low=3, high=8), 8, 120, share(0.1))[-1] == 3
    assert set(run(StalenessController(low=1, high=8), 8, 120, share(100.0))) == {8}


def test_it_rises_again_only_if_tokens_are_as_old_as_it_allows() -> None:
    assert run(StalenessController(low=1, high=4), 1, 80, share(100.0))[-1] == 4
    assert set(run(StalenessController(low=1, high=4), 1, 80, share(100.0), reached=False)) == {1}


def test_it_waits_until_a_change_can_be_seen() -> None:
    seen = run(StalenessController(low=1, high=8), 4, 40, share(0.1))
    changes = [index for index, (one, other) in enumerate(zip([4, *seen], seen, strict=False)) if one != other]
    assert changes[0] >= 9 and changes[1] - changes[0] >= 7


def test_steps_without_a_rate_say_nothing() -> None:
    control = StalenessController(low=1, high=8)
    assert {control.next(4, {"staleness/max": 4.0}) for _ in range(40)} == {4}


def test_it_goes_on_from_its_state() -> None:
    first, second = (StalenessController(low=1, high=8) for _ in range(2))
    run(first, 4, 7, share(0.1))
    restore(second, of_bytes(ControllerState, to_bytes(ControllerState, first)))
    assert run(first, 4, 19, share(0.1)) == run(second, 4, 19, share(0.1))


def test_config() -> None:
    config = small_config(replay__max_staleness=5, algorithm__max_divergence=0.1)
    control = StalenessController.of(config)
    assert control is not None and (control.low, control.high) == (1, 5)
    assert StalenessController.of(small_config(replay__max_staleness=5)) is None
    forced = small_config(replay__max_staleness=5, replay__min_staleness=5, algorithm__max_divergence=0.1)
    assert StalenessController.of(forced) is None, "the learner would wait forever"
    with pytest.raises(ConfigError, match=r"max_staleness = 'auto'"):
        small_config(replay__max_staleness="auto")


def test_a_lower_limit_admits_less_at_once_and_keeps_the_bound() -> None:
    ledger = Ledger(groups_per_step=2, max_staleness=4, admission_limit=3)
    assert ledger.capacity(0) == 8
    ledger.admission_limit = 0
    assert ledger.capacity(0) == 2
    assert [ledger.deadline(ledger.lease(0)) for _ in range(2)] == [4, 4], "the bound is that of the run"
    assert not ledger.can_lease(0)
