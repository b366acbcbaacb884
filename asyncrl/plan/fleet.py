"""A run on any number of GPUs, on paper: its split, the time of a step, and what limits it.

All of it is arithmetic on the constants of `asyncrl.plan.hardware`; nothing is measured. Generation and training
overlap completely, so a step lasts as long as the slower side; the split is the one that trains the most tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from asyncrl.errors import ConfigError
from asyncrl.plan.deliveries import Deliveries, deliveries_of
from asyncrl.plan.hardware import Constants, Links, ModelShape

TENSOR_PARALLEL = (1, 2, 4, 8)
"""GPUs of an engine; they are on one host."""
AS_GOOD = 0.1
"""The smallest engine within this fraction of the most trained tokens is taken: each that dies costs less."""
NOTICED = 1.1
"""A limit is named if one side could be this many times as fast without it."""
TRAJECTORIES = ((8, 256), (64, 1024), (512, 4096), (4096, 8192))
"""GPUs, and trajectories of a step that are usual for so many; in between by the power law through the neighbours."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """A run of one model on a number of GPUs. Rates are tokens that are trained, in tokens per second."""

    model: ModelShape
    gpus: int
    tp: int
    """GPUs of an engine."""
    engines: int
    learners: int
    """GPUs of the learner, one rank each."""
    groups: int
    """Groups of a step, at least one for each rank."""
    sequences: float
    """That an engine decodes at once, on average; below 1 it is idle in between."""
    fitting_sequences: int
    """That its memory has room for."""
    generation_tokens_per_s: float
    training_tokens_per_s: float
    constants: Constants

    @property
    def tokens_per_s(self) -> float:
        """The rate of the slower side."""
        return min(self.generation_tokens_per_s, self.training_tokens_per_s)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        job = self.constants.job
        return self.groups * job.group_size * job.answer_tokens / self.tokens_per_s

    @property
    def answer_s(self) -> float:
        """Seconds of an answer of mean length."""
        return self.constants.job.answer_tokens * decode_s(self.model, self.tp, self.sequences, self.constants)

    @property
    def queue_cores(self) -> float:
        """Cores that the replay queue is busy with, of which it has one. Groups without signal pass through it, too."""
        job, links = self.constants.job, self.constants.links
        num_bytes = links.token_bytes * job.group_size * (job.answer_tokens + job.prompt_tokens)
        return queue_cores(self.groups_per_s, num_bytes, links)

    @property
    def groups_per_s(self) -> float:
        """Groups that arrive at the replay queue per second."""
        return self.groups / self.step_s / self.constants.job.goodput

    @property
    def deliveries(self) -> Deliveries:
        """Seconds until all engines have a version, by transport."""
        return deliveries_of(self.model, self.constants, engines=self.engines, tp=self.tp, learners=self.learners)

    @property
    def failure_s(self) -> float:
        """Mean seconds between two failures anywhere."""
        return self.constants.failures.gpu_s / self.gpus

    @property
    def checkpoint_s(self) -> float:
        """Seconds that training waits for a checkpoint, while each rank copies its part to its host."""
        failures = self.constants.failures
        return failures.saved_bytes * self.model.parameters / (self.learners * failures.copy_bytes_per_s)

    @property
    def write_s(self) -> float:
        """Seconds to write a checkpoint in the background, or to read it."""
        failures, hosts = self.constants.failures, math.ceil(self.learners / self.constants.gpu.per_host)
        return failures.saved_bytes * self.model.parameters / (hosts * failures.write_bytes_per_s)

    @property
    def interval_s(self) -> float:
        """Seconds between two checkpoints: Young's optimum for the learner's failures, unless writing takes longer."""
        failures = self.constants.failures
        optimum_s = math.sqrt(2 * self.checkpoint_s * failures.gpu_s / self.learners)
        return max(optimum_s, 2 * self.write_s, self.step_s, failures.least_interval_s)

    @property
    def loss(self) -> float:
        """Part of the time lost to checkpoints and to failures of the learner, which restarts by itself: the restart,
        reading, and half an interval that is trained again."""
        failures = self.constants.failures
        lost_s = failures.restart_s + self.write_s + self.interval_s / 2
        return self.checkpoint_s / self.interval_s + lost_s * self.learners / failures.gpu_s

    @property
    def loss_by_hand(self) -> float:
        """The same where any death, of an engine too, ends the run until someone starts it again."""
        lost_s = self.constants.failures.manual_s + self.write_s + self.interval_s / 2
        return self.checkpoint_s / self.interval_s + lost_s / self.failure_s

    @property
    def limits(self) -> list[str]:
        """What limits the run beside the number of GPUs: admission, so that engines are not full; memory of the
        learner, whose ranks wait; the replay queue's core; weights that take longer than a step."""
        found = {
            "staleness": self._generation_if_full() > NOTICED * self.generation_tokens_per_s,
            "learner memory": self.learners == least_learners(self.model, self.constants)
            and self.training_tokens_per_s > NOTICED * self.generation_tokens_per_s,
            "queue": self.queue_cores > 1,
            "weights": self.deliveries.fastest[1] > self.step_s,
        }
        return [name for name, is_limit in found.items() if is_limit]

    def _generation_if_full(self) -> float:
        """The rate of generation if all engines could be full."""
        rate = generation_rate(self.model, self.tp, self.fitting_sequences, self.constants)
        return rate * self.engines * self.tp


def plan_fleet(
    model: ModelShape, gpus: int, *, max_staleness: int = 8, constants: Constants | None = None
) -> Fleet | None:
    """Returns the best split of the GPUs, with engines as small as is nearly as good; None if the model does not fit.
    Raises ConfigError."""
    if gpus < 2:
        raise ConfigError(f"--gpus {gpus}: a generator and a learner need one each, so at least 2")
    if max_staleness < 1:
        raise ConfigError(f"--max-staleness {max_staleness}: generation and training overlap only with at least 1")
    found = [
        best
        for tp in TENSOR_PARALLEL
        if (best := _best_split(model, gpus, tp, max_staleness, constants or Constants())) is not None
    ]
    most = max((fleet.tokens_per_s for fleet in found), default=0.0)
    return next((fleet for fleet in found if fleet.tokens_per_s >= (1 - AS_GOOD) * most), None)


def _best_split(model: ModelShape, gpus: int, tp: int, max_staleness: int, constants: Constants) -> Fleet | None:
    """The best split with engines of this size. The groups of a step are the usual ones, and at least one for each rank
    of the split that would be best if staleness were no limit."""
    fitting, least = fitting_sequences(model, tp, constants), least_learners(model, constants)
    most = gpus - tp
    if not fitting or most < least:
        return None

    def best(groups: int | None) -> Fleet:
        ranks = range(least, max(least, min(most, groups or most)) + 1)
        fleets = (_split(model, gpus, tp, learners, groups, max_staleness, constants) for learners in ranks)
        return max(fleets, key=lambda fleet: fleet.tokens_per_s)

    usual = round(trajectories(gpus) / constants.job.group_size)
    return best(max(usual, best(None).learners))


def _split(
    model: ModelShape,
    gpus: int,
    tp: int,
    learners: int,
    groups: int | None,
    max_staleness: int,
    constants: Constants,
) -> Fleet:
    """The run with a number of ranks. Without `groups` staleness is no limit."""
    engines, fitting, sequences = (gpus - learners) // tp, fitting_sequences(model, tp, constants), math.inf
    if groups is not None:
        # One batch of the (S + 1) that admission allows is being trained.
        sequences = max_staleness * groups * constants.job.group_size / engines
    sequences = min(fitting, sequences)
    generation = generation_rate(model, tp, sequences, constants) * engines * tp
    training = learners * training_rate(model, constants)
    return Fleet(
        model, gpus, tp, engines, learners, groups or learners, sequences, fitting, generation, training, constants
    )


def queue_cores(groups_per_s: float, group_bytes: float, links: Links) -> float:
    """Returns the cores that the replay queue is busy with, of which it has one, with groups of this size."""
    return groups_per_s * (links.queue_group_s + links.queue_byte_s * group_bytes)


def trajectories(gpus: int) -> float:
    """Trajectories of a step that are usual for a number of GPUs."""
    pairs = list(pairwise(TRAJECTORIES))
    (low, few), (high, many) = next((pair for pair in pairs if gpus <= pair[1][0]), pairs[-1])
    return few * (gpus / low) ** (math.log(many / few) / math.log(high / low))


def fitting_sequences(model: ModelShape, tp: int, constants: Constants) -> int:
    """Sequences that an engine has memory for beside its weights; 0 if there is none."""
    gpu = constants.gpu
    free = gpu.engine_memory * gpu.memory_bytes * tp - model.bytes
    return min(gpu.max_sequences, max(0, int(free / (model.cache_bytes(tp) * mean_context(constants)))))


def mean_context(constants: Constants) -> float:
    """Tokens before a token that is decoded, on average."""
    return constants.job.prompt_tokens + constants.job.context * constants.job.answer_tokens


def decode_s(model: ModelShape, tp: int, sequences: float, constants: Constants) -> float:
    """Seconds of an engine step, in which each sequence gets a token: weights and caches are read, multiplied, and
    summed over the engine's GPUs twice in each layer."""
    gpu, running = constants.gpu, max(sequences, 1.0)
    read_bytes = model.bytes + running * model.cache_bytes(tp) * mean_context(constants)
    read_s = read_bytes / (tp * gpu.memory_bytes_per_s * gpu.engine_bandwidth)
    multiply_s = 2 * model.active * running / (tp * gpu.flops * gpu.engine_flops)
    shared_bytes = 2 * (tp - 1) / tp * running * model.hidden * 2
    reduce_s = gpu.reduce_s + shared_bytes / gpu.reduce_bytes_per_s if tp > 1 else 0.0
    return read_s + multiply_s + gpu.step_s + 2 * model.layers * reduce_s


def generation_rate(model: ModelShape, tp: int, sequences: float, constants: Constants) -> float:
    """Tokens of one GPU of an engine, per second, that are trained later."""
    return sequences / (decode_s(model, tp, sequences, constants) * tp) * constants.job.goodput


def training_rate(model: ModelShape, constants: Constants) -> float:
    """Tokens that a GPU of the learner trains per second."""
    gpu = constants.gpu
    return gpu.flops * (gpu.moe_mfu if model.is_moe else gpu.dense_mfu) / (gpu.train_flops * model.active)


def least_learners(model: ModelShape, constants: Constants) -> int:
    """The fewest GPUs whose memory has room for the learner's states."""
    return math.ceil(constants.gpu.state_bytes * model.parameters / constants.gpu.learner_bytes)


def least_gpus(model: ModelShape, constants: Constants) -> int:
    """The fewest GPUs on which the model fits: the learner, and the smallest engine."""
    engine = next(tp for tp in TENSOR_PARALLEL if fitting_sequences(model, tp, constants))
    return least_learners(model, constants) + engine
