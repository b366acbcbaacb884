"""Labels every token with the version of the weights that sampled it, also while vLLM keeps a batch in flight.

vLLM labels the output of a batch with the version that is set when the output is taken. With async scheduling a batch
is scheduled and computed while the output of the one before is taken, so one is in flight when weights are swapped:

    schedule b1   swap to version 1   schedule b2   take b1   schedule b3   take b2
    weights: 0                        weights: 1    label 0                 label 1

`VersionLabels` records the version of each batch when it is scheduled, and sets it again before the output is taken.
Both hooks are public: the engine option `scheduler_cls` and `LLMEngine.set_weight_version`.

The weights of a batch are those at its scheduling since vLLM, in one process, starts all kernels of a batch in the step
that schedules it. New weights are copied by the same thread on the same stream, so after them, and no batch need be
waited for. That holds for vLLM's layer-wise reload, too: it allocates, frees and copies on that stream. With tensor
parallelism a worker process takes batches and new weights from one queue, in their order, and does one after the other.
For GPUs this was read in the source of vLLM 0.32, not tested.
"""

from __future__ import annotations

import copyreg
from abc import ABCMeta
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from asyncrl.errors import InvariantError, RunError
from asyncrl.types import NO_VERSION

if TYPE_CHECKING:
    from vllm.outputs import WeightVersionSpan
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput


class OwnScheduler(ABCMeta):
    """Type of the scheduler classes of asyncrl. Pickled, one is the class that it extends: worker processes get it with
    the config, but schedule nothing."""


copyreg.pickle(OwnScheduler, lambda scheduler: (_itself, (scheduler.__base__,)))  # type: ignore[arg-type]


def _itself(scheduler: type) -> type:
    return scheduler


class VersionLabels:
    """The versions of the batches that were scheduled and whose output was not taken yet, the oldest first."""

    def __init__(self) -> None:
        self.version = NO_VERSION
        """Version of the loaded weights, which compute the batches that are scheduled from now on."""
        self.set_weight_version: Callable[[str], None]
        """Sets the label of the output that vLLM takes next."""
        self._in_flight: deque[tuple[SchedulerOutput, int]] = deque()

    def scheduled(self, batch: SchedulerOutput) -> None:
        """Records the version of a batch."""
        self._in_flight.append((batch, self.version))

    def taken(self, batch: SchedulerOutput) -> None:
        """Labels the output of a batch. Raises InvariantError when batches are not taken in the order of scheduling."""
        if not self._in_flight or self._in_flight[0][0] is not batch:
            raise InvariantError("the engine took the output of a batch that is not the oldest in flight")
        _, version = self._in_flight.popleft()
        self.set_weight_version(str(version))

    def scheduler(self, base: type[Scheduler]) -> type[Scheduler]:
        """Returns vLLM's scheduler class with labelled batches."""
        labels = self

        class LabellingScheduler(base, metaclass=OwnScheduler):
            def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
                batch = super().schedule(throttle_prefills)
                labels.scheduled(batch)
                return batch

            def update_from_output(
                self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
            ) -> dict[int, EngineCoreOutputs]:
                labels.taken(scheduler_output)
                return super().update_from_output(scheduler_output, model_runner_output)

        return LabellingScheduler


def check_first_versions(spans: Sequence[WeightVersionSpan] | None) -> None:
    """Checks the labels of a completion of which batch 0, scheduled under version 0, sampled the first token, batch 1
    under version 1 the second. Raises RunError if they are others: this vLLM does not label as described above."""
    versions = [span.version for span in spans or []]
    if not versions or versions != ["0", "1"][: len(versions)]:
        import vllm

        raise RunError(
            f"vLLM {vllm.__version__} labels the first tokens with the versions {versions}, but they were sampled "
            "under 0 and 1; install the version that this release requires (`make setup`)"
        )
