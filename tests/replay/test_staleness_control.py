"""The limit that moves with the effective sample size."""

from __future__ import annotations

import pytest

from asyncrl.errors import ConfigError
from asyncrl.replay.ledger import Ledger
from asyncrl.replay.staleness_control import ControllerState, StalenessController
from asyncrl.util.durable import of_plain, restore, to_plain
from tests.helpers.replay import small_config


def controller(low: int, high: int) -> StalenessController:
    return StalenessController(low=low, high=high, target=0.9)


def metrics(limit: int, sizes: dict[str, float]) -> dict[str, float]:
    told = {"staleness/max": float(limit)}
    for bucket, size in sizes.items():
        told |= {f"staleness/{bucket}/ess": size, f"staleness/{bucket}/tokens_fraction": 0.2}
    return told


def run(control: StalenessController, limit: int, steps: int, worth: int) -> list[int]:
    """Returns the limit of each step, in which tokens older than `worth` have a small sample size."""
    seen: list[int] = []
    for _ in range(steps):
        sizes = {
            bucket: 0.95 if staleness <= worth else 0.5
            for staleness, bucket in enumerate(("0", "1", "2", "3-4"))
            if staleness <= limit
        }
        limit = control.next(limit, metrics(limit, sizes))
        seen.append(limit)
    return seen


def test_it_rises_to_what_is_worth_training_and_stays_near() -> None:
    seen = run(controller(1, 8), 1, 60, worth=2)
    assert seen[0] == 1
    assert set(seen[20:]) == {2, 3}, "it tries a higher limit now and then"


def test_it_keeps_its_bounds() -> None:
    assert max(run(controller(0, 3), 0, 60, worth=100)) == 3
    assert min(run(controller(1, 8), 3, 60, worth=-1)) == 1


def test_it_waits_until_a_change_can_be_seen() -> None:
    seen = run(controller(0, 8), 4, 12, worth=-1)
    changes = [index for index, (one, other) in enumerate(zip([4, *seen], seen, strict=False)) if one != other]
    assert changes[0] >= 4
    assert changes[1] - changes[0] >= 4


def test_a_limit_that_does_not_bind_stays() -> None:
    control = controller(0, 8)
    assert {control.next(2, metrics(1, {"0": 1.0, "1": 0.99})) for _ in range(30)} == {2}


def test_few_tokens_say_nothing() -> None:
    control, told = controller(0, 8), metrics(2, {"0": 1.0, "2": 0.1})
    told["staleness/2/tokens_fraction"] = 0.001
    assert min(control.next(2, told) for _ in range(30)) == 2


def test_it_goes_on_from_its_state() -> None:
    first, second = controller(0, 8), controller(0, 8)
    run(first, 4, 3, worth=-1)
    restore(second, of_plain(ControllerState, to_plain(ControllerState, first)))
    assert run(first, 4, 9, worth=-1) == run(second, 4, 9, worth=-1)


def test_config() -> None:
    config = small_config(replay__max_staleness="auto", replay__auto_options={"low": 0, "high": 5})
    assert (config.replay.first_limit, config.replay.staleness_limit) == (0, 5)
    control = StalenessController.of(config)
    assert control is not None
    assert (control.low, control.high) == (0, 5)
    assert StalenessController.of(small_config()) is None
    with pytest.raises(
        ConfigError, match=r"auto_options.low = 4 with high = 4: must be a limit of at least 0 and a higher one"
    ):
        small_config(replay__max_staleness="auto", replay__auto_options={"low": 4, "high": 4})
    with pytest.raises(ConfigError, match="max_staleness"):
        small_config(replay__max_staleness="often")


def test_a_lower_limit_admits_less_at_once_and_keeps_the_bound() -> None:
    ledger = Ledger(groups_per_step=2, max_staleness=4, admission_limit=3)
    assert ledger.capacity(0) == 8
    ledger.admission_limit = 0
    assert ledger.capacity(0) == 2
    assert [ledger.deadline(ledger.lease(0)) for _ in range(2)] == [4, 4], "the bound is that of the run"
    assert not ledger.can_lease(0)
