"""The card that a generator shares with learner ranks (`launch.colocate`): when it has the card, and when it sleeps.

    holds the card    loads weights, generates; asks for leases
      v               enough batches are finished, or there is nothing more to generate (`sleep_after_step`)
    asleep            the engine has freed the card; heartbeats continue, no leases are asked for
      v               a new version is staged, and the learner has released the card (`can_load`)
    holds the card    weights are loaded, then the cache comes back (`woken`)

With the transport ipc, the learner hands a version over while it has the card:

    asleep            as above
      v               the learner offers a version: nothing but its weights is on the card
    visits the card   takes memory for weights (`wake_weights`) and loads them; frees it if they do not come (`give_up`)
      v               the learner has moved its weights away, and released the card (`woken`)
    holds the card    the cache comes back

    waits for         woken by                             deadline
    a new version     the learner, at the end of its turn  none here: the launcher's progress_timeout_s
    the card          polled once per tick                 launch.progress_timeout_s without progress of its holder

Death of this process releases the card; the learner's turn then ends after its step, for the new process to start.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.generator.engine import Engine
from asyncrl.util.locks import CardLock, Cards, CardWait, card_path

if TYPE_CHECKING:
    from asyncrl.weights.receiver import BackgroundReceiver

log = structlog.get_logger()

_PROGRESS_S = 1.0
"""Interval at which a generating engine is noted as progress."""


class OwnCard:
    """The card of a generator that shares it with nobody: it is always there."""

    asleep = False
    """True while the engine must not be used, except for `add` and `abort`."""
    batches = 0
    """Finished batches, as the replay queue last said."""

    @property
    def enough(self) -> bool:
        """True if the generator should finish what it must, and ask for no more groups."""
        return False

    def sleep_after_step(self, *, busy: bool, idle: bool) -> None:
        """Releases the card if it is the learner's turn. `busy`: the engine has work for which it needs its weights;
        `idle`: it has none at all, and gets none."""

    def can_load(self, receiver: BackgroundReceiver) -> bool:
        """True if the engine can load what the receiver has. Takes the card for that, unless it is the learner's."""
        return True

    def wake_weights(self) -> None:
        """Takes the memory of the engine's weights, unless it is there."""

    def give_up(self) -> None:
        """A version that began to come will not: frees what was taken for it in the learner's turn."""

    def woken(self) -> None:
        """The new version is loaded: generation continues, once the card is there."""


class SharedCard(OwnCard):
    """The card or cards of a generator, which learner ranks use in turn with it."""

    def __init__(self, config: Config, engine: Engine, cards: Cards) -> None:
        """The engine was built with the cards, which this generator still has."""
        if not (hasattr(engine, "sleep") and hasattr(engine, "wake")):
            raise ConfigError(
                f"launch.colocate = {config.launch.colocate!r}: the engine {config.generator.engine!r} has no methods "
                "`sleep` and `wake` (asyncrl/generator/engine.py); use launch.colocate=off"
            )
        self._engine, self._cards = engine, cards
        self._batches = max(1, config.replay.max_staleness)
        # Without the base, adapters would have nothing to change.
        self._level = 1 if config.learner.lora.rank else 2
        self._timeout_s = config.launch.progress_timeout_s
        self._hands_over = config.hands_over
        self._has_card = self._has_weights = True
        self._is_loaded = False
        """True while a new version is loaded, and the card is the learner's."""
        self._wait: list[CardWait] = []
        self._next_note_s = 0.0
        self._sleep()  # the first version comes from the learner

    @property
    def enough(self) -> bool:
        """True if the queue has as many finished batches as the learner trains in its turn."""
        return self.batches >= self._batches

    def sleep_after_step(self, *, busy: bool, idle: bool) -> None:
        if self.asleep:
            return
        now_s = time.monotonic()
        if now_s >= self._next_note_s:
            self._next_note_s = now_s + _PROGRESS_S
            self._cards.note_progress()
        if not busy and (self.enough or (idle and self.batches) or self._cards.is_wanted):
            self._sleep()

    def _sleep(self) -> None:
        began_s = time.monotonic()
        self._engine.sleep(self._level)
        self.asleep, self._has_weights, self._has_card, self._wait = True, False, False, []
        self._cards.release()
        log.info("engine sleeps", sleep_ms=round((time.monotonic() - began_s) * 1e3, 1), batches=self.batches)

    def can_load(self, receiver: BackgroundReceiver) -> bool:
        if self._is_loaded:
            self.woken()
        if not self.asleep:
            return True
        if self._hands_over:
            return receiver.round() is not None
        if not (receiver.has_version and self._take()):
            return False
        self.wake_weights()
        return True

    def _take(self) -> bool:
        """Takes the card, unless it is there. False while it is the learner's."""
        if self._has_card:
            return True
        if not self._wait:
            self._wait = self._cards.waits(self._timeout_s)
        self._has_card = self._cards.try_acquire()
        if not self._has_card:
            for one in self._wait:
                one.check()
        return self._has_card

    def wake_weights(self) -> None:
        if not self._has_weights:
            if not self._has_card:
                self._cards.visit(self._timeout_s)
            self._engine.wake("weights")
            self._has_weights = True

    def give_up(self) -> None:
        if self.asleep and self._has_weights:
            self._engine.sleep(self._level)
            self._has_weights = self._is_loaded = False
            self._cards.end_visit()

    def woken(self) -> None:
        if not self.asleep:
            return
        self._is_loaded = True
        if not self._take():
            return
        self._engine.wake("cache")
        # What the queue said before is of the learner's turn.
        self.asleep, self._is_loaded, self.batches, self._wait = False, False, 0, []


def cards_of(config: Config, index: int, run_dir: Path) -> Cards | None:
    """Returns the cards of a generator; None if it shares none. Generators that join later bring cards of their own."""
    if not config.launch.colocated or index >= config.launch.generators:
        return None
    parallel = config.generator.tensor_parallel
    numbers = range(index * parallel, (index + 1) * parallel)
    return Cards([CardLock(card_path(run_dir, number), f"generator-{index}") for number in numbers])
