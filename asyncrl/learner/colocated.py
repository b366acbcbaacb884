"""The card that a learner rank shares with a generator (`launch.colocate`): when it has the card.

    begin      a batch is ready: takes the card, and the states of its models back from the host
               trains, step after step, while the next batch is complete
    is_over    no batch is left, the version is to be evaluated, or the generator starts: the version is sent
    make_room  with the transport ipc: moves all but the weights to the host; the generator loads them from the card
    end        moves the states of its models to the host, and releases the card

A turn of the generator follows each turn of the learner: it loads the version that was sent, and generates. Weights
arrive in its host memory while it sleeps, so that no more than one of the two ever needs the card. With the transport
ipc they are handed over in the learner's turn: both have weights on the card then, and nothing else. A generator that
starts later, or did not get them, has the learner take its turn once more for that.

Waits for the card have the deadline `launch.progress_timeout_s`, which starts again while its holder makes progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog
from torch import Tensor

from asyncrl.config.config import Config
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.step import Trainer
from asyncrl.util.host_memory import HostMemory
from asyncrl.util.locks import CardLock
from asyncrl.util.processes import Stopwatch
from asyncrl.wire.messages import Committed

log = structlog.get_logger()

PHASES = ("learner", "generator", "wait", "reload", "offload", "hand_over")
"""The phases of a card, as its learner rank sees them: it trains; the generator has the card and no batch is complete;
it has a batch and waits for the card; it takes its states back; it moves them to the host; the generator loads the
weights that are on the card."""


class OwnCard:
    """The card of a rank that shares it with nobody: it is always there."""

    hands_over = False
    """True if versions are sent at the end of a turn, when all but the weights has left the card."""
    can_hand_over = False
    """True if it hands over, and it is not this rank's turn."""

    def holds(self, trainer: Trainer, committed: int) -> None:
        """States what is on the card, and the last step that was committed before this start: until then steps are
        trained again, and not sent."""

    def begin(self, *, soon: bool = False, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Takes the card, unless this rank has it. With `soon` the generator need not have had its turn, and releases
        the card after a step. `meanwhile` is called during the wait."""

    def is_over(self, step: int, committed: Committed) -> bool:
        """True if the version of this step is sent. All ranks call it."""
        return True

    def make_room(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Returns the weights to send; if it hands over, nothing else of this rank is on the card then."""
        return weights

    def end(self, copied: Callable[[], None]) -> None:
        """Releases the card; `copied` waits until the weights that were sent may change."""

    def metrics(self) -> dict[str, float]:
        """The seconds of each phase since the last call."""
        return {}


class SharedCard(OwnCard):
    """The card of a rank, which a generator uses in turn with it."""

    def __init__(self, config: Config, ranks: Ranks, lock: CardLock) -> None:
        """Waits for the card: the models are built on it."""
        self._config, self._ranks, self._lock = config, ranks, lock
        self.hands_over = config.hands_over
        self._memory = HostMemory(ranks.device)
        self._trainer: Trainer | None = None
        self._committed = 0
        self._watch = Stopwatch(PHASES)
        lock.acquire(config.launch.progress_timeout_s)

    @property
    def can_hand_over(self) -> bool:  # type: ignore[override]
        return self.hands_over and not self._lock.held

    def holds(self, trainer: Trainer, committed: int) -> None:
        self._trainer, self._committed = trainer, committed
        self._watch.lap()

    def begin(self, *, soon: bool = False, meanwhile: Callable[[], None] = lambda: None) -> None:
        if self._lock.held:
            return
        self._watch.switch("wait")
        self._lock.acquire(self._config.launch.progress_timeout_s, in_turn=not soon, meanwhile=meanwhile)
        self._watch.switch("reload")
        self._memory.reload()
        self._watch.switch("learner")

    def is_over(self, step: int, committed: Committed) -> bool:
        self._lock.note_progress()
        # The other ranks do not know what the queue has answered.
        over = self._ranks.rank == 0 and (
            not committed.batches or step == self._config.steps or self._config.evaluates(step)
        )
        return step >= self._committed and self._ranks.any(over or self._lock.is_wanted)

    def make_room(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        if not self.hands_over:
            return weights
        kept = list(weights)
        self._watch.switch("offload")
        assert self._trainer is not None
        self._memory.offload(self._trainer.tensors(), keep=[tensor for _, tensor in kept])
        self._watch.switch("hand_over")
        return kept

    def end(self, copied: Callable[[], None]) -> None:
        if not self._lock.held:
            return
        copied()
        self._watch.switch("offload")
        assert self._trainer is not None
        num_bytes = self._memory.offload(self._trainer.tensors())
        self._watch.switch("generator")
        self._lock.release()
        log.info("card released", moved_bytes=num_bytes)

    def metrics(self) -> dict[str, float]:
        return {f"card/{name}_s": seconds for name, seconds in self._watch.lap().items()}
