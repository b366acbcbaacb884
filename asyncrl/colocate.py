"""A device that a generator and a learner rank use in turn (`launch.colocate`): a GPU, or the cores of a CPU.

    LearnerTurn                                          GeneratorTurn
    begin      a batch is ready: takes the device,       asleep: the engine has freed the device; heartbeats continue,
               and its states back from the host         no leases are requested
               trains, step after step, while the
               next batch is complete
    make_room  with the transport ipc: moves all but     visits the device: takes memory for weights (`wake_weights`)
               the weights to the host                   and loads them; frees it if they do not come (`give_up`)
    end        sends the version; moves its states to    can_load: a version is staged, and the device is free
               the host, and releases the device
    waits      for its turn and a batch                  loads the weights, takes the cache back (`woken`), generates
                                                         until enough batches are finished (`sleep_after_step`)

A turn of the generator follows each turn of the learner. Weights arrive in host memory while the generator sleeps, so
that only one of the two needs the device. With the transport ipc both have weights on it in the learner's turn, and
nothing else. A generator that starts later, or missed the weights, makes the learner take its turn again.

    waits for                     woken by                             deadline
    the device                    polled                               launch.progress_timeout_s without progress of
                                                                       its holder
    a new version (generator)     the learner, at the end of its turn  none here: the launcher's progress_timeout_s
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from asyncrl.config.config import Config
from asyncrl.errors import PeerTimeoutError
from asyncrl.util.locks import IN_USE, no_locks
from asyncrl.util.processes import Stopwatch
from asyncrl.wire.messages import Committed

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from asyncrl.weights.receiver import BackgroundReceiver

log = structlog.get_logger()

PHASES = ("learner", "generator", "wait", "reload", "offload", "hand_over")
"""The phases of a device for its learner rank: it trains; the generator has the device and no batch is complete; it has
a batch and waits for the device; it takes its states back; it moves them to the host; the generator loads the weights
that are on the device."""
_POLL_S = 0.005
"""Interval of the attempts to acquire a device."""
_PROGRESS_S = 1.0
"""Interval at which a generating engine is noted as progress."""
_RECORD_BYTES = 128
_HELD, _WANTED, _VISITED = 0, 1, 2
"""The bytes of the file that are locked by the holder, by a role that should get the device soon, and by one that has
memory on it in the turn of its holder."""
_DEPTH = 6
"""Levels of containers in which DeepSpeed's tensors are searched."""


def device_path(run_dir: Path, device: int) -> Path:
    """Returns the file of the lock of a device, by the number of its learner rank."""
    return run_dir / "devices" / f"device-{device}"


class DeviceLock:
    """One role's side of the lock of a device, for one process and one thread.

    It is a record lock of the system on a file of the run folder: the death of its holder releases it, and children of
    the holder do not keep it. The file has the role that acquired it last, and its modification time is the time of the
    last progress of the holder.
    """

    def __init__(self, path: Path, owner: str) -> None:
        """`owner` is the name of the role."""
        self._owner, self._name = owner, path.stem
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.held = False
        """True while this role has the device."""

    @property
    def last(self) -> str:
        """The role that acquired the device last; empty if none did, or if that one has left."""
        return self._record()[0]

    @property
    def is_wanted(self) -> bool:
        """True if another role is waiting for the device. The holder checks this between steps."""
        if not self._try(_WANTED):
            return True
        self._free(_WANTED)
        return False

    def try_acquire(self) -> bool:
        """Acquires the device unless another role has it, or memory on it. Returns True if it was acquired; a visit of
        this role has ended then."""
        if not self._try(_HELD):
            return False
        if not self._try(_VISITED):
            self._free(_HELD)
            return False
        self._free(_VISITED)
        self._write(f"{self._owner} {os.getpid()}")
        self.held = True
        return True

    def acquire(self, timeout_s: float, *, in_turn: bool = False, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Waits for the device. With `in_turn` another role must have had it since this one did; otherwise its holder
        is asked to release it soon. `meanwhile` is called during the wait. Raises PeerTimeoutError if its holder makes
        no progress within `timeout_s`."""
        wait = DeviceWait(self, timeout_s)
        if not in_turn:
            self._try(_WANTED)
        try:
            while (in_turn and self.last == self._owner) or not self.try_acquire():
                wait.check()
                time.sleep(_POLL_S)
                meanwhile()
                if not in_turn:
                    self._try(_WANTED)
        finally:
            self._free(_WANTED)

    def visit(self, timeout_s: float) -> None:
        """Keeps other roles from acquiring the device, which one of them has: when that one ends, this role's memory is
        still there. Raises PeerTimeoutError as `acquire`."""
        wait = DeviceWait(self, timeout_s)
        while not self._try(_VISITED):  # another role checks it
            wait.check()
            time.sleep(_POLL_S)

    def end_visit(self) -> None:
        """Ends a visit: this role has freed its memory."""
        self._free(_VISITED)

    def note_progress(self) -> None:
        """Restarts the deadlines of roles that wait for this holder."""
        os.utime(self._file)

    def release(self) -> None:
        """Releases the device, if this role has it."""
        if self.held:
            self.held = False
            self._free(_HELD)

    def leave(self) -> None:
        """Releases the device, for the last time; idempotent."""
        if self._file < 0:
            return
        if self.held or self.last == self._owner:
            self._write("")
        self.release()
        os.close(self._file)
        self._file = -1

    def changed_ns(self) -> int:
        """Returns the time at which it was acquired, or at which its holder last made progress."""
        return os.fstat(self._file).st_mtime_ns

    def describe(self) -> str:
        """Describes the current holder, for error messages."""
        name, process = self._record()
        is_visited = not self._try(_VISITED)
        if not is_visited:
            self._free(_VISITED)
        who = f"{name}, process {process}" if name else "free"
        return f"{self._name} ({who}{'; another role has memory on it' if is_visited else ''})"

    def _record(self) -> tuple[str, str]:
        name, _, process = os.pread(self._file, _RECORD_BYTES, 0).decode(errors="replace").strip().partition(" ")
        return name, process

    def _write(self, text: str) -> None:
        os.pwrite(self._file, text.encode()[:_RECORD_BYTES].ljust(_RECORD_BYTES), 0)  # at once: others read it

    def _try(self, byte: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno in IN_USE:
                return False
            raise no_locks(Path(self._name), error) from None
        return True

    def _free(self, byte: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)


class DeviceWait:
    """The deadline of a wait for a device, which restarts whenever its holder makes progress."""

    def __init__(self, lock: DeviceLock, timeout_s: float) -> None:
        self._lock, self._timeout_s = lock, timeout_s
        self._changed_ns = lock.changed_ns()
        self._since_s = time.monotonic()

    def check(self) -> None:
        """Raises PeerTimeoutError after the deadline."""
        changed_ns, now_s = self._lock.changed_ns(), time.monotonic()
        if changed_ns != self._changed_ns:
            self._changed_ns, self._since_s = changed_ns, now_s
        if now_s - self._since_s > self._timeout_s:
            raise PeerTimeoutError(
                f"the device {self._lock.describe()} was not released, and its holder made no progress, within "
                f"{self._timeout_s:g} s (launch.progress_timeout_s)"
            )


class NoLock:
    """The device of a role that shares it with no other role: it always has its turn."""

    asleep = False
    """Generator: true while the engine must not be used, except for `add` and `abort`."""
    batches = 0
    """Generator: finished batches, by the last reply of the replay queue."""
    enough = False
    """Generator: true if it should finish what it must, and request no more groups."""
    hands_over = False
    """Learner: true if versions are sent at the end of a turn, when all but the weights has left the device."""
    can_hand_over = False
    """Learner: true if it hands over, and it is not this rank's turn."""

    def sleep_after_step(self, *, busy: bool, idle: bool) -> None:
        """Generator: releases the device if it is the learner's turn. `busy`: the engine has work for which it needs
        its weights; `idle`: it has none at all, and gets none."""

    def can_load(self, receiver: BackgroundReceiver) -> bool:
        """Generator: true if the engine can load what the receiver has. Takes the device for that, unless it is the
        learner's."""
        return True

    def wake_weights(self) -> None:
        """Generator: takes the memory of the engine's weights, unless it is there."""

    def give_up(self) -> None:
        """Generator: a version that began to arrive will not: frees the memory taken for it in the learner's turn."""

    def woken(self) -> None:
        """Generator: the new version is loaded: generation continues, once the device is there."""

    def holds(self, trainer: _Trainer, committed: int) -> None:
        """Learner: reports the tensors on the device, and the last step that was committed before this start: until
        then steps are trained again, and not sent."""

    def begin(self, *, soon: bool = False, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Learner: takes the device, unless this rank has it. With `soon` the generator need not have had its turn, and
        releases the device after a step. `meanwhile` is called during the wait."""

    def is_over(self, step: int, committed: Committed) -> bool:
        """Learner: true if the version of this step is sent. All ranks call it."""
        return True

    def make_room(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Learner: returns the weights to send; if it hands over, nothing else of this rank is on the device then."""
        return weights

    def end(self, copied: Callable[[], None]) -> None:
        """Learner: releases the device; `copied` waits until the weights that were sent may change."""

    def metrics(self) -> dict[str, float]:
        """Learner: returns the seconds of each phase since the last call."""
        return {}


class GeneratorTurn(NoLock):
    """The devices of a generator, which learner ranks use in turn with it."""

    def __init__(self, config: Config, engine: Any, locks: Sequence[DeviceLock]) -> None:
        """The engine was built on the devices, which this generator still has."""
        self._engine, self._locks = engine, locks
        self._batches = max(1, config.replay.max_staleness)
        # Without the base, adapters would have nothing to change.
        self._level = 1 if config.learner.lora.rank else 2
        self._timeout_s = config.launch.progress_timeout_s
        self._hands_over = config.hands_over
        self._has_device = self._has_weights = True
        self._is_loaded = False
        """True while a new version is loaded, and the device is the learner's."""
        self._waits: list[DeviceWait] = []
        self._next_note_s = 0.0
        self._sleep()  # the first version comes from the learner

    @property
    def enough(self) -> bool:  # type: ignore[override]
        return self.batches >= self._batches

    def sleep_after_step(self, *, busy: bool, idle: bool) -> None:
        if self.asleep:
            return
        now_s = time.monotonic()
        if now_s >= self._next_note_s:
            self._next_note_s = now_s + _PROGRESS_S
            for lock in self._locks:
                lock.note_progress()
        is_wanted = any(lock.is_wanted for lock in self._locks)
        if not busy and (self.enough or (idle and self.batches) or is_wanted):
            self._sleep()

    def _sleep(self) -> None:
        began_s = time.monotonic()
        self._engine.sleep(self._level)
        self.asleep, self._has_weights, self._has_device, self._waits = True, False, False, []
        self._release()
        log.info("engine sleeps", sleep_ms=round((time.monotonic() - began_s) * 1e3, 1), batches=self.batches)

    def _release(self) -> None:
        for lock in self._locks:
            lock.release()

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
        """Takes the devices, unless they are there: all or none, since other roles may want a part of them."""
        if self._has_device:
            return True
        self._waits = self._waits or [DeviceWait(lock, self._timeout_s) for lock in self._locks]
        self._has_device = all(lock.try_acquire() for lock in self._locks)
        if not self._has_device:
            self._release()
            for wait in self._waits:
                wait.check()
        return self._has_device

    def wake_weights(self) -> None:
        if not self._has_weights:
            if not self._has_device:
                for lock in self._locks:
                    lock.visit(self._timeout_s)
            self._engine.wake("weights")
            self._has_weights = True

    def give_up(self) -> None:
        if self.asleep and self._has_weights:
            self._engine.sleep(self._level)
            self._has_weights = self._is_loaded = False
            for lock in self._locks:
                lock.end_visit()

    def woken(self) -> None:
        if not self.asleep:
            return
        self._is_loaded = True
        if not self._take():
            return
        self._engine.wake("cache")
        # The queue's last count is of the learner's turn.
        self.asleep, self._is_loaded, self.batches, self._waits = False, False, 0, []


def generator_locks(config: Config, index: int, run_dir: Path) -> list[DeviceLock]:
    """Returns the locks of a generator's devices; none if it shares none. Generators that join later bring their own
    devices."""
    if not config.launch.colocated or index >= config.launch.generators:
        return []
    parallel = config.generator.tensor_parallel
    devices = range(index * parallel, (index + 1) * parallel)
    return [DeviceLock(device_path(run_dir, device), f"generator-{index}") for device in devices]


class _Ranks(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def any(self, flag: bool) -> bool: ...


class _Trainer(Protocol):
    def tensors(self) -> Iterable[Tensor]: ...


class LearnerTurn(NoLock):
    """The device of a rank, which a generator uses in turn with it."""

    def __init__(self, config: Config, ranks: _Ranks, lock: DeviceLock) -> None:
        """Waits for the device: the models are built on it."""
        self._config, self._ranks, self._lock = config, ranks, lock
        self.hands_over = config.hands_over
        self._memory = HostMemory(ranks.device)
        self._trainer: _Trainer | None = None
        self._committed = 0
        self._watch = Stopwatch(PHASES)
        lock.acquire(config.launch.progress_timeout_s)

    @property
    def can_hand_over(self) -> bool:  # type: ignore[override]
        return self.hands_over and not self._lock.held

    def holds(self, trainer: _Trainer, committed: int) -> None:
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
        # The other ranks do not have the queue's answer.
        over = self._ranks.rank == 0 and (
            not committed.batches or step == self._config.steps or self._config.evaluates(step)
        )
        return step >= self._committed and self._ranks.any(over or self._lock.is_wanted)

    def make_room(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        if not self.hands_over:
            return weights
        stays = list(weights)
        self._offload(keep=[tensor for _, tensor in stays])
        self._watch.switch("hand_over")
        return stays

    def _offload(self, keep: Iterable[Tensor] = ()) -> int:
        self._watch.switch("offload")
        assert self._trainer is not None
        return self._memory.offload(self._trainer.tensors(), keep=keep)

    def end(self, copied: Callable[[], None]) -> None:
        if not self._lock.held:
            return
        copied()
        num_bytes = self._offload()
        self._watch.switch("generator")
        self._lock.release()
        log.info("device released", moved_bytes=num_bytes)

    def metrics(self) -> dict[str, float]:
        return {f"card/{name}_s": seconds for name, seconds in self._watch.lap().items()}


class HostMemory:
    """Moves the memory of tensors from a GPU to the host and back. The tensors stay, with all views of them. On a CPU
    nothing moves, unless `always`."""

    def __init__(self, device: torch.device, *, always: bool = False) -> None:
        self._device = device
        self._moves = always or device.type != "cpu"
        self._buffers: dict[int, Tensor] = {}
        """Page-locked memory by the address of a storage, kept between two moves."""
        self._moved: dict[int, torch.UntypedStorage] = {}

    @property
    def is_moved(self) -> bool:
        """True from `offload` to `reload`."""
        return bool(self._moved)

    def offload(self, tensors: Iterable[Tensor], keep: Iterable[Tensor] = ()) -> int:
        """Moves the memory of the tensors to the host, except the memory of those to `keep`, which another call moves.
        Returns the bytes of all that is moved."""
        import torch

        if not self._moves:
            return 0
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # other streams may use them
        stays = self._storages(keep)
        for address, storage in self._storages(tensors).items():
            if address in stays or not storage.resizable():
                continue
            buffer = self._buffers.get(address)
            if buffer is None or buffer.nbytes != storage.nbytes():
                buffer = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._buffers[address], self._moved[address] = buffer.copy_(_content(storage)), storage
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return sum(self._buffers[address].nbytes for address in self._moved)

    def _storages(self, tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
        """Returns the memory of the tensors on the device, by its address."""
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            if tensor.device == self._device and (storage := tensor.untyped_storage()).nbytes():
                storages[storage._cdata] = storage  # pyright: ignore[reportPrivateUsage]
        return storages

    def reload(self) -> None:
        """Moves everything back, unless nothing is moved."""
        if not self._moved:
            return
        self._buffers = {address: self._buffers[address] for address in self._moved}
        for address, storage in self._moved.items():
            storage.resize_(self._buffers[address].nbytes)
            _content(storage).copy_(self._buffers[address], non_blocking=True)
        self._moved = {}
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)


def _content(storage: torch.UntypedStorage) -> Tensor:
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def states_of(trained: Any) -> Iterator[Tensor]:
    """Yields the tensors of a model under training: of the network, and the ones that its optimizer and DeepSpeed
    keep. One may be yielded several times.

    DeepSpeed's `offload_states` knows stages 1 and 2, and its own optimizers in stage 3. This search depends on
    neither; a tensor that it misses stays on the GPU.
    """
    yield from tensors_of(trained.network)
    for state in (trained.optimizer.state, vars(trained.engine.optimizer)):
        yield from _inside(state, _DEPTH, set())


def tensors_of(network: nn.Module) -> Iterator[Tensor]:
    """Yields the parameters of a network, their parts of ZeRO stage 3, their gradients, and its buffers."""
    for parameter in network.parameters():
        parts = parameter.detach(), parameter.grad, getattr(parameter, "ds_tensor", None)
        yield from (part for part in parts if part is not None)
    yield from network.buffers()


def _inside(value: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:
    from torch import Tensor, nn

    if isinstance(value, Tensor):
        yield value.detach()
        return
    if depth == 0 or id(value) in seen:
        return
    if isinstance(value, Mapping):
        members: Iterable[Any] = list(value.values())
    elif isinstance(value, list | tuple | set):
        members = value
    elif type(value).__module__.startswith("deepspeed.runtime") and not isinstance(value, nn.Module):
        members = list(getattr(value, "__dict__", {}).values())
    else:
        return
    seen.add(id(value))
    for member in members:
        yield from _inside(member, depth - 1, seen)
