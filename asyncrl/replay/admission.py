"""How many groups a generator may start: the staleness bound of the ledger, and the limits of this process."""

from __future__ import annotations

from asyncrl.config.config import Config
from asyncrl.replay.store import Store


class Admission:
    """The decision; it changes nothing."""

    def __init__(self, config: Config, store: Store) -> None:
        self._settings = config.replay
        self._store, self._state = store, store.state

    @property
    def share(self) -> int:
        """Maximum number of leases of one generator, so that the first to ask does not leave the others idle."""
        return self._state.ledger.per_generator_limit(self._state.generators_wanted)

    def room(self, generator: int, version: int, wanted: int) -> int:
        """Returns how many leases of others the generator may get in addition to those that are returned already."""
        ledger = self._state.ledger
        oldest = (version + ledger.max_staleness + 1) * ledger.groups_per_step
        if ledger.charged > oldest or self._store.disk_is_slow():
            return 0
        return min(wanted, self.share - self._state.leased_by[generator]) - len(ledger.returned)

    def grant(self, generator: int, version: int, wanted: int) -> tuple[int, str]:
        """Returns how many of the wanted groups the generator may start now, and the reason why not all; empty if all.
        Above a size limit only groups that the next batch needs may start: memory and journal only shrink when a batch
        is trained. None may start while the journal's disk is too slow."""
        ledger, settings, state = self._state.ledger, self._settings, self._state
        granted, reason = wanted, ""
        if (limit := ledger.num_leasable(version)) < granted:
            granted, reason = limit, "staleness"
        if (limit := self.share - state.leased_by[generator]) < granted:
            granted, reason = max(0, limit), "share"
        if granted and self._store.disk_is_slow():
            return 0, "disk"
        full = "bytes" if state.held_bytes >= settings.max_bytes else "journal" if self._store.above_ceiling else ""
        if full:
            needed = (settings.min_staleness + 1) * settings.groups_per_step - len(ledger.live)
            if (limit := len(ledger.returned) + max(0, needed)) < granted:
                granted, reason = limit, full
        return granted, reason
