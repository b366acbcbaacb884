"""A simulated run over several machines: how its weights travel, how often machines fail, and what both cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from asyncrl.config.sections import CheckpointConfig
from asyncrl.errors import ConfigError
from asyncrl.plan.deliveries import Deliveries, deliveries_of
from asyncrl.plan.hardware import MODELS, Constants, Failures, Links, ModelShape
from asyncrl.plan.machines import MachineFailures, devices_of, place, usual_machines
from asyncrl.plan.prediction import Prediction
from asyncrl.plan.simulate import simulate
from asyncrl.plan.workload import Setup, SyncCost, Workload
from asyncrl.util.hints import unknown_name
from asyncrl.util.quantities import bytes_per_s_of, seconds_of

CHECKPOINT_STEPS: int = CheckpointConfig.model_fields["every_steps"].default
NOISE = 0.02
"""Change of the rate by which runs of a few hundred steps differ for no other reason than the groups at their ends."""
TRANSPORTS = ("tree", "chain", "nccl", "shards", "delta")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadOptions:
    """Options of `asyncrl simulate` about machines; all None for a run without links and failures."""

    model: str | None = None
    transport: str | None = None
    link: str | None = None
    hosts: int | None = None
    mtbf: str | None = None
    restart_s: float | None = None
    checkpoint_steps: int | None = None
    checkpoint_s: float | None = None

    def given(self, *names: str) -> str:
        """The first of these options that is given; empty if none is."""
        return next((name for name in names if getattr(self, name) is not None), "")


@dataclass(frozen=True, slots=True)
class Spread:
    """The deliveries and failures of a simulation."""

    transport: str
    """Empty if deliveries take what the workload says."""
    sync: SyncCost
    failures: MachineFailures | None


@dataclass(frozen=True, slots=True)
class SpreadResult:
    """Predictions of the same run."""

    spread: Spread
    ideal: Prediction
    """Versions are with the engines at once, and no machine fails."""
    delivered: Prediction
    """No machine fails."""
    found: Prediction


def spread_of(options: SpreadOptions, sync: SyncCost, setup: Setup) -> Spread | None:
    """Returns what the options say of a run with these costs of weights; None if they say nothing. Raises
    ConfigError."""
    sends = options.given("model", "transport", "link")
    if not sends and options.mtbf is None:
        if alone := options.given("hosts", "restart_s", "checkpoint_steps", "checkpoint_s"):
            needs = "--mtbf or --model" if alone == "hosts" else "--mtbf"
            raise ConfigError(f"--{alone.replace('_', '-')}: changes nothing without {needs}")
        return None
    if options.hosts is not None:
        place(setup, options.hosts)
    machines = usual_machines(setup) if options.hosts is None else options.hosts
    model, transport = None, ""
    if sends:
        if options.model is None:
            raise ConfigError(f"--model: is missing: --{sends} is about its weights; one of {', '.join(MODELS)}")
        if options.model not in MODELS:
            raise unknown_name("--model", options.model, MODELS)
        model = MODELS[options.model]
        transport, sync = _delivery(options, model, sync, setup, machines)
    return Spread(transport, sync, _failures(options, model, setup, machines))


def simulate_spread(workload: Workload, setup: Setup, spread: Spread, *, seed: int) -> SpreadResult:
    """Simulates the run without and with its deliveries and failures, with the same groups."""
    at_once = replace(spread.sync, broadcast_s=0.0, delta_s=0.0)
    ideal = simulate(replace(workload, sync=at_once), setup, seed=seed)
    workload = replace(workload, sync=spread.sync)
    delivered = simulate(workload, setup, seed=seed)
    if spread.failures is None:
        return SpreadResult(spread, ideal, delivered, delivered)
    return SpreadResult(spread, ideal, delivered, simulate(workload, setup, seed=seed, failures=spread.failures))


def over_link(links: Links, bytes_per_s: float) -> Links:
    """These links where a host has a network of this rate."""
    return replace(
        links,
        stream_bytes_per_s=min(links.stream_bytes_per_s, bytes_per_s),
        host_bytes_per_s=bytes_per_s,
        nccl_bytes_per_s=min(links.nccl_bytes_per_s, bytes_per_s),
    )


def _delivery(
    options: SpreadOptions, model: ModelShape, sync: SyncCost, setup: Setup, machines: int
) -> tuple[str, SyncCost]:
    """The transport and its costs."""
    constants = Constants()
    if options.link is not None:
        constants = replace(constants, links=over_link(constants.links, bytes_per_s_of("--link", options.link)))
    per_host = -(-devices_of(setup) // machines)
    constants = replace(constants, gpu=replace(constants.gpu, per_host=per_host))
    ways = deliveries_of(model, constants, engines=setup.generators, tp=1, learners=setup.learners)
    name = ways.fastest[0].lower() if options.transport is None else options.transport
    if name not in TRANSPORTS:
        raise unknown_name("--transport", name, TRANSPORTS)
    return name, replace(sync, broadcast_s=_seconds(ways, name), delta_s=ways.spread_s if name == "delta" else 0.0)


def _seconds(ways: Deliveries, transport: str) -> float:
    return float(getattr(ways, f"{transport}_s"))


def _failures(options: SpreadOptions, model: ModelShape | None, setup: Setup, machines: int) -> MachineFailures | None:
    if options.mtbf is None:
        return None
    known, checkpoint_s = Failures(), options.checkpoint_s
    if checkpoint_s is None:
        saved_bytes = 0.0 if model is None else known.saved_bytes * model.parameters
        checkpoint_s = saved_bytes / (setup.learners * known.copy_bytes_per_s)
    steps = options.checkpoint_steps
    if steps is None:
        steps = CHECKPOINT_STEPS
    return MachineFailures(
        machines=machines,
        mtbf_s=seconds_of("--mtbf", options.mtbf),
        restart_s=known.restart_s if options.restart_s is None else options.restart_s,
        checkpoint_steps=steps,
        checkpoint_s=checkpoint_s,
    )


def sentences(result: SpreadResult) -> Iterable[str]:
    """Returns the cost of deliveries and of failures, a sentence each."""
    ideal, delivered, found, spread = result.ideal, result.delivered, result.found, result.spread
    if spread.transport:
        seconds = spread.sync.broadcast_s
        steps = seconds * delivered.steps_per_s
        kept = ", and what changed meanwhile goes with the next one" if spread.sync.delta_s else ""
        yield (
            f"deliveries: {spread.transport} takes {seconds:.3g} s for a version, {steps:.2f} steps{kept}; "
            f"{_cost(ideal, delivered)}"
        )
    if spread.failures is not None and (failed := found.failed) is not None:
        yield (
            f"failures: {failed.generator_machines:,} of machines with generators, {failed.learner_machines:,} with "
            f"learners; {failed.steps_again:,} steps trained again, {failed.lost_tokens:,} tokens lost; "
            f"{_cost(delivered, found)}"
        )


def _cost(before: Prediction, after: Prediction) -> str:
    """The change of trained tokens per second, of staleness and of the time in which generators are parked."""
    change = after.tokens_per_s / before.tokens_per_s - 1
    noise = " (the draws vary as much)" if abs(change) < NOISE else ""
    return (
        f"tokens/s {change:+.1%}{noise}, staleness "
        f"{before.staleness_mean:.2f} -> {after.staleness_mean:.2f}, generators parked {before.generator_idle:.1%} -> "
        f"{after.generator_idle:.1%}"
    )
