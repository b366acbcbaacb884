"""Deliveries of weights over links in the simulation, and what `asyncrl simulate` says of them and of failures."""

from __future__ import annotations

import io
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from asyncrl.errors import ConfigError
from asyncrl.plan.deliveries import STRIDES, chain_s, delta_of_steps, tree_s
from asyncrl.plan.hardware import MODELS, Links
from asyncrl.plan.show import show_simulation
from asyncrl.plan.simulate import simulate
from asyncrl.plan.spread import TRANSPORTS, SpreadOptions, over_link, sentences, simulate_spread, spread_of
from asyncrl.plan.workload import EngineCost, LearnerCost, Lengths, SyncCost, Workload
from asyncrl.util.quantities import bytes_per_s_of, seconds_of
from tests.helpers.cli import asyncrl
from tests.plan.test_simulate import same, setup

LINKS = ("400Gb/s", "100Gb/s", "10Gb/s", "1Gb/s", "200Mb/s", "20Mb/s")
LENGTHS = Lengths.log_normal(mean_tokens=1000, sigma=1.0, max_tokens=8000, group_size=8)
BIG = setup(generators=12, learners=4, max_staleness=3, groups_per_step=32, max_running_groups=16, steps=60)
BALANCED = Workload(LENGTHS, EngineCost(0.01, 5e-5), LearnerCost(0.0, 1e-4))


def test_a_slower_link_never_trains_more_and_makes_tokens_older() -> None:
    for transport in TRANSPORTS:
        rates, ages = list[float](), list[float]()
        for link in LINKS:
            spread = spread_of(SpreadOptions(model="7B", transport=transport, link=link), SyncCost(), BIG)
            assert spread is not None
            result = simulate_spread(BALANCED, BIG, spread, seed=0)
            rates.append(result.found.tokens_per_s)
            ages.append(result.found.staleness_mean)
            assert result.found.tokens_per_s <= 1.001 * result.ideal.tokens_per_s
        assert all(slow <= 1.001 * fast for fast, slow in pairwise(rates)), (transport, rates)
        assert all(slow >= fast - 0.02 for fast, slow in pairwise(ages)), (transport, ages)
        assert rates[-1] < 0.9 * rates[0] and ages[-1] > ages[0]


def test_deliveries_by_hand() -> None:
    """A synchronous step waits for its version: generation, training, and a chain of three over 1 Gb/s."""
    workload = Workload(same(10), EngineCost(0.01, 0.0), LearnerCost(0.2, 0.001))
    chosen = setup(generators=3, groups_per_step=3, group_size=1, max_running_groups=1, steps=10)
    options = SpreadOptions(model="1.5B", transport="chain", link="1Gb/s")
    spread = spread_of(options, SyncCost(swap_s=0.02), chosen)
    assert spread is not None
    sent_s = chain_s(MODELS["1.5B"].bytes, 3, replace(Links(), stream_bytes_per_s=125e6))
    assert spread.sync == SyncCost(sent_s, 0.0, 0.02) and sent_s == pytest.approx(3.08e9 / 125e6, rel=0.06)
    result = simulate_spread(workload, chosen, spread, seed=0)
    step_s = 10 * 0.01 + 0.2 + 30 * 0.001
    assert result.ideal.wall_s == pytest.approx(10 * step_s + 9 * 0.02)
    assert result.found.wall_s == pytest.approx(10 * step_s + 9 * (0.02 + sent_s))
    (sentence,) = sentences(result)
    steps = sent_s * 10 / result.found.wall_s
    assert sentence.startswith(f"deliveries: chain takes {sent_s:.3g} s for a version, {steps:.2f} steps; tokens/s ")
    assert f"tokens/s {result.ideal.wall_s / result.found.wall_s - 1:+.1%}" in sentence


def test_the_learner_does_not_wait_for_deltas() -> None:
    """Versions take 2.5 steps: a learner whose generators are ahead trains on, and the engines get each version that is
    the newest when the one before it has come."""
    workload = Workload(same(10), EngineCost(0.01, 0.0), LearnerCost(1.0, 1e-9))
    chosen = setup(groups_per_step=2, group_size=1, max_running_groups=4, max_staleness=9, steps=200)
    ideal = simulate(workload, chosen)
    waiting = simulate(replace(workload, sync=SyncCost(2.5)), chosen)
    following = simulate(replace(workload, sync=SyncCost(2.5, delta_s=1e-9)), chosen)
    assert following.wall_s == pytest.approx(ideal.wall_s)
    assert waiting.wall_s > 2.4 * ideal.wall_s
    # A delta over more steps takes longer: with 3 versions ahead at most, generators are parked more.
    near = replace(chosen, max_staleness=3)
    short, long = (simulate(replace(workload, sync=SyncCost(2.5, delta_s=delta_s)), near) for delta_s in (1e-9, 2.5))
    assert long.wall_s > 1.1 * short.wall_s


@given(st.integers(1, 500))
def test_deltas_over_more_steps_are_larger_but_smaller_than_their_sum(steps: int) -> None:
    assert delta_of_steps(steps) < delta_of_steps(steps + 1)
    assert delta_of_steps(steps) <= steps
    assert [delta_of_steps(known) for known, _ in STRIDES] == pytest.approx([cost for _, cost in STRIDES])


def test_links_bound_what_is_sent_over_them() -> None:
    slow, fast = over_link(Links(), 2.5e6), over_link(Links(), 100e9)
    assert (slow.stream_bytes_per_s, slow.host_bytes_per_s, slow.nccl_bytes_per_s) == (2.5e6, 2.5e6, 2.5e6)
    assert (fast.stream_bytes_per_s, fast.host_bytes_per_s, fast.nccl_bytes_per_s) == (2.5e9, 100e9, 25e9)
    assert tree_s(15.22e9, 3, slow) == pytest.approx(2 * 15.22e9 / 2.5e6)


def test_quantities_have_units() -> None:
    assert [seconds_of("--since", text) for text in ("90s", "1.5m", "100h", "2 d")] == [90, 90, 360_000, 172_800]
    assert [bytes_per_s_of("--link", text) for text in ("800kb/s", "20Mb/s", "1Gb/s")] == [1e5, 2.5e6, 1.25e8]
    for text in ("20", "20mb", "Mb/s", "0Gb/s", "-1Gb/s", "1.2.3Gb/s", "20MB/s", ""):
        with pytest.raises(ConfigError, match=r"--link .*: must be a number above 0 with a unit"):
            bytes_per_s_of("--link", text)


MADE_UP = ["--mean-tokens=20", "--engine-base-ms=3", "--learner-token-us=100"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--transport=chain"], "--model: is missing: --transport is about its weights; one of 1.5B, 7B, 32B, 70B, "),
        (["--model=8B"], "--model = '8B': there is no such one"),
        (["--model=7B", "--transport=pigeon"], "--transport = 'pigeon': there is no such one (of tree, chain, nccl, s"),
        (["--model=7B", "--broadcast-s=1"], "--broadcast-s: is what --model and its transport take; leave one of the"),
        (["--model=7B", "--link=fast"], "--link fast: must be a number above 0 with a unit"),
        (["--restart-s=5"], "--restart-s: changes nothing without --mtbf"),
        (["--hosts=2"], "--hosts: changes nothing without --mtbf or --model"),
        (["--mtbf=100"], "--mtbf 100: must be a number above 0 with a unit, one of s, m, h, d, as in 10m"),
        (["--mtbf=100h", "--hosts=9"], "simulate: 9 machines for 2 devices; each needs one at least"),
        (["--mtbf=100h", "--checkpoint-steps=0"], "simulate: checkpoint_steps = 0, must be above 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    code, output = asyncrl("simulate", *MADE_UP, *options, cwd=tmp_path)
    assert code == 2 and output.startswith(f"error: {message}"), output


def test_the_command_says_what_deliveries_and_failures_cost() -> None:
    out = io.StringIO()
    numbers = {"mean_tokens": 200.0, "engine_base_ms": 10.0, "learner_token_us": 100.0}
    options = SpreadOptions(model="1.5B", link="100Mb/s", hosts=2, mtbf="1h", checkpoint_steps=5)
    chosen = {"generators": 3, "max_staleness": 3}
    found = show_simulation(Console(file=out, width=200), None, numbers, dict(chosen), spread=options)
    lines = {line.split("  ")[0]: line for line in out.getvalue().splitlines()}
    assert found.failed is not None and found.failed.generator_machines + found.failed.learner_machines > 0
    assert lines["trained tokens/s"].split()[-1] == f"{found.tokens_per_s:,.0f}"
    ideal, delivered, failed = (float(text.replace(",", "")) for text in lines["trained tokens/s"].split()[2:])
    assert ideal > delivered > failed
    text = out.getvalue()
    assert "deliveries: delta takes " in text and "failures: " in text and "ideal   deliveries   and failures" in text
    again = io.StringIO()
    show_simulation(Console(file=again, width=200), None, numbers, dict(chosen), spread=SpreadOptions())
    assert "ideal" not in again.getvalue()


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("```\nasyncrl simulate ")
    command, _, rest = rest.partition("\n```\n")
    shown = rest.partition("```\n")[2].partition("```")[0]
    code, output = asyncrl("simulate", *shlex.split(command.replace("\\\n", " ")), cwd=tmp_path)
    assert code == 0, output
    assert [line.rstrip() for line in output.splitlines()][-len(shown.splitlines()) :] == shown.splitlines()
