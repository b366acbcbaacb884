"""The process group of the learner ranks: rendezvous, collectives, and errors raised on all ranks.

The other modules import DeepSpeed from here, so that it is set up for the available accelerator before its import.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.errors import AsyncrlError, PeerTimeoutError, RunError
from asyncrl.learner.model.attention import SequenceParallel
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.rpc import announce, located
from asyncrl.wire.store import RemoteStore, StoreServer, TorchStore

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.runtime.base_optimizer import ZeROOptimizer as ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer as BF16_Optimizer

# cuDNN builds a plan for every new attention shape, which takes some 100 ms where the kernel takes less than one, and
# almost every packed row has a new shape.
torch.backends.cuda.enable_cudnn_sdp(False)
deepspeed.utils.logger.setLevel(logging.WARNING)
# This op serves tensor-parallel inference only; without this line the first start on a CPU would compile it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# DeepSpeed calls deprecated names of collectives several times per step.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)

TEXT_BYTES = 2048
"""Maximum length of a text that one rank sends to the others."""
SILENT, BROKEN = "t", "e"
"""First letter of the text of an error: a peer did not answer, or any other error."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's membership in the learner ranks. Every method is a collective: all ranks call it, in the same
    order."""

    rank: int
    count: int
    device: torch.device
    what: str = "learner"
    group: dist.ProcessGroup | None = None
    """The members; None if they are all processes."""
    parallel: SequenceParallel | None = None
    """The ranks that share this one's sequences; None if no other rank has them."""
    members: Ranks | None = None

    @property
    def of_data(self) -> Ranks:
        """The ranks over which data are summed: one of each set of ranks that share sequences, else all."""
        return self.members or self

    def sum(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        return bool(self.max(torch.tensor([int(flag)])))

    def barrier(self) -> None:
        """Waits until all ranks have called it."""
        self.any(False)

    def gather(self, values: Tensor) -> Tensor:
        """Returns the values of all ranks, [count, ...], on the CPU."""
        if self.count == 1:
            return values.unsqueeze(0).cpu()
        parts = [torch.empty_like(values, device=self.device) for _ in range(self.count)]
        dist.all_gather(parts, values.to(self.device), group=self.group)
        return torch.stack(parts).cpu()

    def gather_texts(self, text: str) -> list[str]:
        """Returns the texts of all ranks, each cut at TEXT_BYTES."""
        encoded = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        table = self.gather(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in table]

    def raise_on_all_ranks(self, error: AsyncrlError | None) -> None:
        """Raises on all ranks if any rank has an error. A rank with an error raises that one; any other rank raises the
        error of the lowest failed rank, as a PeerTimeoutError if it is one and otherwise as a RunError."""
        mark = SILENT if isinstance(error, PeerTimeoutError) else BROKEN
        texts = self.gather_texts("" if error is None else f"{mark}{error}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text:
                kind = PeerTimeoutError if text[0] == SILENT else RunError
                raise kind(f"{self.what} rank {rank}: {text[1:]}")

    def _reduce(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.count == 1:
            return values.cpu()
        values = values.to(self.device, copy=True)
        dist.all_reduce(values, op=how, group=self.group)
        return values.cpu()


def own_device(rank: int) -> torch.device:
    """Returns the device of this process: of the GPUs that it sees, the one of LOCAL_RANK, which launchers set."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))


def enable_determinism() -> None:
    """Makes this process compute identical results from identical inputs. Call it before the process uses a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling new tensors would only make memory deterministic that nothing reads.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def process_group(
    endpoints: Endpoints,
    rank: int,
    count: int,
    *,
    start_timeout_s: float,
    timeout_s: float,
    what: str = "learner",
    sequence_parallel: int = 1,
) -> Iterator[Ranks]:
    """Connects the ranks of the role `what` and yields them; each collective then has the deadline `timeout_s`.
    `sequence_parallel` adjacent ranks share their sequences.

    A rank that leaves the context breaks the collectives of the others: call `Ranks.barrier` before leaving.
    Rank 0 opens the rendezvous at `endpoints.learners`. Raises PeerTimeoutError, naming the missing ranks, if not all
    ranks connect within `start_timeout_s`, and if another rank is lost later.
    """
    device = own_device(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(device.index or 0)}
    backend = "nccl" if device.type == "cuda" else "gloo"
    with _rendezvous(endpoints, rank, count, start_timeout_s, what) as store, _failures_named(rank, count, what):
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=timeout_s),
        )
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, timeout=timedelta(seconds=timeout_s))
        ranks = Ranks(rank, count, device, what)
        yield ranks if sequence_parallel == 1 else _sharing(ranks, sequence_parallel)
        dist.destroy_process_group()


def _sharing(ranks: Ranks, size: int) -> Ranks:
    """Returns the ranks with `size` adjacent ones that share their sequences. All ranks call it."""
    sets = [range(first, first + size) for first in range(0, ranks.count, size)]
    shared: list[Any] = [dist.new_group(list(members)) for members in sets]
    across: list[Any] = [dist.new_group(list(range(offset, ranks.count, size))) for offset in range(size)]
    number, offset = divmod(ranks.rank, size)
    members = replace(ranks, rank=number, count=len(sets), group=across[offset])
    return replace(ranks, parallel=SequenceParallel(offset, size, shared[number]), members=members)


@contextmanager
def _rendezvous(endpoints: Endpoints, rank: int, count: int, timeout_s: float, what: str) -> Iterator[TorchStore]:
    """Yields the store that the ranks share, once all ranks are connected to it."""
    deadline_s = time.monotonic() + timeout_s
    with ExitStack() as stack:
        run_id, keys = endpoints.run_id, endpoints.keys
        if rank == 0:
            store = StoreServer(endpoints.listening(endpoints.learners), f"{what}s", run_id=run_id, keys=keys)
            stack.callback(store.close)
            announce(endpoints, endpoints.learners, store.channel.address)
        else:
            try:
                address = located(endpoints, endpoints.learners, timeout_s=timeout_s, own_epoch=True)
                store = RemoteStore.connect(address, run_id=run_id, keys=keys, timeout_s=timeout_s)
            except PeerTimeoutError as error:
                raise PeerTimeoutError(f"{what} rank {rank}: no rendezvous within {timeout_s:g} s: {error}") from error
            stack.callback(store.close)
        store.ask("set", [f"here/{rank}"])
        missing: list[int] = []
        for other in range(count):
            try:
                store.ask("wait", [f"here/{other}"], within_s=max(deadline_s - time.monotonic(), 0.001))
            except TimeoutError:
                missing.append(other)
        if missing:
            raise PeerTimeoutError(f"{what} ranks {missing} of {count} did not come up within {timeout_s:g} s")
        yield TorchStore(store, "torch/", timeout_s)


@contextmanager
def _failures_named(rank: int, count: int, what: str) -> Iterator[None]:
    """Converts the RuntimeError of a broken collective to a PeerTimeoutError, if there are other ranks."""
    try:
        yield
    except AsyncrlError:
        raise
    except RuntimeError as error:
        if count == 1 or not is_lost_rank(error):
            raise
        raise PeerTimeoutError(
            f"{what} rank {rank}: another {what} rank stopped or did not answer: {str(error).splitlines()[0]}"
        ) from error


def is_lost_rank(error: RuntimeError) -> bool:
    """True if a collective failed because of another rank."""
    text = str(error)
    return isinstance(error, dist.DistError) or "gloo" in text or "NCCL" in text
