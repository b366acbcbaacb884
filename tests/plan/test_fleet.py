"""The fleet on paper: known cases by hand, what may only grow, and the tables in the docs."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from asyncrl.errors import ConfigError
from asyncrl.plan.deliveries import Deliveries, best_chunk_bytes, chain_s, deliveries_of, tree_s
from asyncrl.plan.fleet import (
    Fleet,
    decode_s,
    fitting_sequences,
    least_gpus,
    least_learners,
    plan_fleet,
    training_rate,
    trajectories,
)
from asyncrl.plan.fleet_tables import short, show_fleet
from asyncrl.plan.hardware import MODELS, Constants, Links, constants_in_use
from tests.helpers.cli import asyncrl
from tests.helpers.examples import examples

KNOWN, LINKS = Constants(), Links()
PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
SEVEN = MODELS["7B"]


def fleet(name: str, gpus: int, *, max_staleness: int = 8, constants: Constants = KNOWN) -> Fleet:
    found = plan_fleet(MODELS[name], gpus, max_staleness=max_staleness, constants=constants)
    assert found is not None
    return found


def test_an_engine_step_by_hand() -> None:
    # 100 sequences with 300 + 0.6 * 8192 tokens of 2 * 2 * 28 * 4 * 128 bytes each, and the weights.
    read_s = (15.22e9 + 100 * 5215.2 * 57_344) / (3.35e12 * 0.7)
    multiply_s = 100 * 2 * 7.61e9 / (989e12 * 0.5)
    assert decode_s(SEVEN, 1, 100, KNOWN) == pytest.approx(read_s + multiply_s + 4e-3, rel=1e-6)
    assert read_s + multiply_s + 4e-3 == pytest.approx(26.3e-3, rel=0.01)
    # Two GPUs share the work; each layer has two all-reduces of 100 * 3584 numbers, of which each sends half, twice.
    reduce_s = 56 * (10e-6 + 100 * 3584 * 2 / 200e9)
    assert decode_s(SEVEN, 2, 100, KNOWN) == pytest.approx((read_s + multiply_s) / 2 + 4e-3 + reduce_s, rel=1e-6)


def test_sequences_that_fit_by_hand() -> None:
    assert fitting_sequences(SEVEN, 1, KNOWN) == int((72e9 - 15.22e9) / (57_344 * 5215.2)) == 189
    assert fitting_sequences(MODELS["70B"], 1, KNOWN) == 0
    # Each of 8 GPUs has one of 4 key-value heads, so that each head is there twice.
    assert fitting_sequences(MODELS["235B-A22B"], 8, KNOWN) == int(106e9 / (2 * 2 * 94 * 8 * 128 * 5215.2)) == 52


def test_the_learner_by_hand() -> None:
    assert training_rate(SEVEN, KNOWN) == pytest.approx(4549, rel=0.001)
    assert training_rate(MODELS["235B-A22B"], KNOWN) == pytest.approx(989e12 * 0.2 / 220e9)
    assert [least_learners(shape, KNOWN) for shape in MODELS.values()] == [1, 3, 9, 19, 63]


def test_a_small_fleet_by_hand() -> None:
    one = fleet("7B", 8)
    assert (one.engines, one.tp, one.learners, one.groups, one.sequences) == (5, 1, 3, 32, 189)
    assert one.step_s == pytest.approx(256 * 8192 / (3 * 4549), rel=0.001), "3 ranks are slower than 5 engines"
    assert 5 * 189 / decode_s(SEVEN, 1, 189, KNOWN) * 0.7 > 3 * 4549
    num_bytes = 13 * 8 * 8492
    assert one.queue_cores == pytest.approx(32 / one.step_s / 0.7 * (0.56e-3 + 1.22e-9 * num_bytes))


def test_the_queue_costs_what_was_measured() -> None:
    cost_s = [LINKS.queue_group_s + LINKS.queue_byte_s * size for size in (118e3, 1.84e6)]
    assert cost_s == pytest.approx([700e-6, 2.8e-3], rel=0.01)


def test_the_ways_of_weights_by_hand() -> None:
    assert tree_s(10e9, 4, LINKS) == pytest.approx(3 * 4.0), "after 2 rounds 1 + 3 members have it"
    assert tree_s(10e9, 3, LINKS) == pytest.approx(2 * 4.0)
    assert best_chunk_bytes(10e9, 101, LINKS) == pytest.approx(5e6)
    assert chain_s(10e9, 101, LINKS) == pytest.approx((2000 + 100) * (0.1e-3 + 2e-3))
    assert chain_s(10e9, 1, LINKS) == pytest.approx(10e9 / 64e6 * (0.1e-3 + 25.6e-3))
    found = deliveries_of(SEVEN, KNOWN, engines=40, tp=1, learners=24)
    assert found.nccl_s == pytest.approx(15.22 / 25 + 0.8e-3), "no rank gathers"
    assert found.shards_s == pytest.approx(15.22 / 12.5 * 5 / 3), "3 hosts send to 5"
    changed = 0.012 * 7.61e9
    assert found.delta_bytes == pytest.approx(1.31 * changed)
    way_s = min(tree_s(1.31 * changed, 40, LINKS), chain_s(1.31 * changed, 40, LINKS))
    assert found.delta_s == pytest.approx(2.6 * 7.61 / 24 + way_s + 1e-8 * changed + 1.522)
    assert found.far_s == pytest.approx(1.31 * changed / 2.5e6)


@pytest.mark.parametrize(("steps", "stride"), [(1.0, 1), (1.5, 4), (2.6, 16), (4.9, 64), (5.0, None)])
def test_a_far_generator_follows_by_strides(steps: float, stride: int | None) -> None:
    assert Deliveries(0, 0, 0, 0, 0, 0, 0, far_s=30.0 * steps).far_stride(30.0) == stride


def test_what_others_have_published_is_of_the_same_size() -> None:
    """verl#7060, H100: seconds of a delta; those of a broadcast are of one whose weights are gathered first."""
    for name, delta_s, gathered_s in (("7B", 3.9, 5.5), ("32B", 6.2, 14.2), ("70B", 12.0, 28.5)):
        found = fleet(name, 64).deliveries
        assert found.delta_s == pytest.approx(delta_s, rel=0.25)
        assert found.nccl_s < gathered_s / 4


def test_failures_by_hand() -> None:
    one = fleet("7B", 4096)
    assert one.failure_s / 3600 == pytest.approx(54 * 24 * 16_384 / 419 / 4096)
    assert 12 < one.failure_s / 3600 < 13
    assert one.checkpoint_s == pytest.approx(14 * 7.61e9 / (one.learners * 20e9))
    assert one.interval_s == 300, "the optimum is below the least"
    rare = fleet("7B", 8)
    assert rare.interval_s == pytest.approx((2 * rare.checkpoint_s * KNOWN.failures.gpu_s / 3) ** 0.5)
    write_s = 14 * 7.61e9 / 2e9
    lost_s = 60 + write_s + rare.interval_s / 2
    assert rare.loss == pytest.approx(rare.checkpoint_s / rare.interval_s + lost_s * 3 / KNOWN.failures.gpu_s)
    assert one.loss_by_hand == pytest.approx((1800 + 150) * 4096 / KNOWN.failures.gpu_s, rel=0.05)


def test_what_does_not_fit_is_said() -> None:
    fits = {(name, gpus): plan_fleet(MODELS[name], gpus) is not None for name in MODELS for gpus in (8, 64, 512)}
    assert [case for case, fit in fits.items() if not fit] == [
        ("32B", 8), ("70B", 8), ("235B-A22B", 8), ("235B-A22B", 64),
    ]  # fmt: skip
    for shape in MODELS.values():
        least = least_gpus(shape, KNOWN)
        assert plan_fleet(shape, least) is not None
        assert least == 2 or plan_fleet(shape, least - 1) is None
    code, output = asyncrl("plan", "--fleet", "--gpus", "8", "--model", "70B")
    assert code == 0
    assert "| 70B | 8 | does not fit: at least 21 GPUs |" in output


def test_what_limits_is_named() -> None:
    assert fleet("7B", 64).limits == []
    assert fleet("7B", 512).limits == ["staleness"]
    assert fleet("7B", 512, max_staleness=16).limits == []
    slow = Constants(links=replace(LINKS, host_bytes_per_s=1e7, nccl_bytes_per_s=1e7, stream_bytes_per_s=1e5))
    assert fleet("7B", 64, constants=slow).limits == ["weights"]
    short_answers = replace(KNOWN.job, answer_tokens=1024)
    assert "queue" in fleet("7B", 4096, constants=Constants(job=short_answers)).limits
    little = Constants(gpu=replace(KNOWN.gpu, learner_bytes=10e9))
    assert fleet("7B", 16, constants=little).limits == ["learner memory"]


shapes = st.sampled_from(list(MODELS))
numbers = st.integers(80, 1024)


@settings(max_examples=examples(25))
@given(name=shapes, gpus=numbers, max_staleness=st.integers(1, 16))
def test_more_gpus_and_staleness_train_no_less(name: str, gpus: int, max_staleness: int) -> None:
    one = fleet(name, gpus, max_staleness=max_staleness)
    assert one.engines * one.tp + one.learners <= gpus
    assert one.learners <= one.groups
    assert one.sequences * one.engines <= max_staleness * one.groups * 8 * (1 + 1e-9)
    answers_per_s = one.generation_tokens_per_s / 0.7 / 8192
    assert answers_per_s * one.answer_s == pytest.approx(one.engines * one.sequences), "Little's law"
    assert fleet(name, 2 * gpus, max_staleness=max_staleness).tokens_per_s >= one.tokens_per_s
    assert fleet(name, gpus, max_staleness=max_staleness + 1).tokens_per_s >= 0.9 * one.tokens_per_s


@settings(max_examples=examples(50))
@given(
    num_bytes=st.floats(1e5, 1e12), more=st.floats(1.0, 10.0), receivers=st.integers(1, 4000),
    others=st.integers(0, 1000), chunk=st.floats(1e6, 64e6),
)  # fmt: skip
def test_more_bytes_and_receivers_take_no_less(
    num_bytes: float, more: float, receivers: int, others: int, chunk: float
) -> None:
    for way in (tree_s, chain_s):
        least_s = way(num_bytes, receivers, LINKS) * (1 - 1e-9)
        assert way(num_bytes * more, receivers, LINKS) >= least_s
        assert way(num_bytes, receivers + others, LINKS) >= least_s
    if chunk <= num_bytes:
        other_s = (num_bytes / chunk + receivers - 1) * (LINKS.message_s + chunk / LINKS.stream_bytes_per_s)
        assert chain_s(num_bytes, receivers, LINKS) <= other_s * (1 + 1e-9), "no other chunk is better"


def test_trajectories_go_through_the_usual_numbers() -> None:
    assert [round(trajectories(gpus)) for gpus in (8, 64, 512, 4096)] == [256, 1024, 4096, 8192]
    steps = [trajectories(gpus) for gpus in range(2, 8192)]
    assert steps == sorted(steps)


def test_numbers_are_short() -> None:
    assert [short(x) for x in (12_345.6, 9.96, 9.94, 0.123, 0.00045)] == ["12,346", "10", "9.9", "0.12", "0.00045"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--fleet", "--gpus", "8,many"], "--gpus 8,many: must be numbers, as in 8,64,512"),
        (["--fleet", "--gpus", "1"], "--gpus 1: must be from 2 to 32,768"),
        (["--fleet", "--model", "23B"], "--model = '23B': there is no such one"),
        (["--fleet", "--max-staleness", "0"], "generation and training overlap only with at least 1"),
        (["--fleet", "--mean-tokens", "0"], "--mean-tokens 0: must be from 1 to 1,048,576"),
        (["--fleet", "--devices", "8"], "--fleet: is computed without a run; leave --from and --devices out"),
        (["--devices", "8"], "--from: is missing; or use --model PATH or --fleet, which need no run"),
        (["--from", "runs/demo"], "--devices: is missing; or use --model PATH or --fleet, which need no run"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], text: str) -> None:
    code, output = asyncrl("plan", *arguments)
    assert code == 2
    assert text in " ".join(output.split())


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="--gpus 1: a generator and a learner need one each"):
        plan_fleet(SEVEN, 1)


def test_the_tables_in_the_docs_are_what_the_command_prints() -> None:
    console = Console(file=io.StringIO(), width=80)
    show_fleet(console, "8,64,512,4096", ",".join(MODELS), max_staleness=8, answer_tokens=8192)
    printed = console.file.getvalue().strip()  # type: ignore[attr-defined]
    assert printed in PAGE.read_text(encoding="utf-8")
    assert printed.startswith("Computed, not measured.")
    assert len(constants_in_use(KNOWN)) > 30
    assert all(source for _, _, _, source in constants_in_use(KNOWN))
