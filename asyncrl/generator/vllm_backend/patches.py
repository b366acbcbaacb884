"""Changes of vLLM for which it has no option."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import threading
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.util.processes import end_with_parent

if TYPE_CHECKING:
    from torch.nn import Module
    from vllm.config import VllmConfig

SHARED_MEMORY = Path("/dev/shm")


def prepare_generator() -> None:
    """Makes an engine in this process leave no names of files and of shared memory; idempotent."""
    _remove_queue_names()
    _remove_rendezvous_names()


def prepare_worker(config: VllmConfig) -> None:
    """Prepares a process that computes a part of the model: the generator's or, with tensor parallelism, a child of
    it, which ends with it; idempotent."""
    if config.parallel_config.world_size > 1:
        parent = multiprocessing.parent_process()
        assert parent is not None and parent.pid is not None
        end_with_parent(parent.pid)  # the generator may have ended while this process imported vLLM
        from tqdm import tqdm

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the workers of an engine are on one machine
        tqdm.set_lock(threading.RLock())  # by default it has a semaphore with a name, which a killed process leaves
        _remove_queue_names()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import torch

        _keep_weights_beside_packed()
        _remove_communicator_names()
        # vLLM would still compile one line of its sampler: the C++ compiler runs for a minute where nothing is cached.
        torch.compiler.set_stance("force_eager")


def _keep_weights_beside_packed() -> None:
    """Makes vLLM keep the weights in addition to their packed copies on a CPU. By default it drops them, and new
    weights need a layer-wise reload; weights that are kept are overwritten in place and packed again."""
    from vllm.model_executor.layers import utils

    pack = inspect.unwrap(utils.dispatch_cpu_unquantized_gemm)

    @wraps(pack)
    def pack_and_keep(layer: Module, remove_weight: bool) -> None:
        pack(layer, remove_weight=False)

    utils.dispatch_cpu_unquantized_gemm = pack_and_keep


def _remove_queue_names() -> None:
    """Makes vLLM remove the name of the memory of a message queue as soon as all of its processes have mapped it, so
    that nothing is left when they are killed."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    wait = inspect.unwrap(MessageQueue.wait_until_ready)

    @wraps(wait)
    def wait_and_remove(queue: Any) -> None:
        wait(queue)
        buffer = queue.buffer
        if buffer is not None and buffer.is_creator:
            buffer.shared_memory.unlink()
            buffer.is_creator = False  # otherwise it is removed again at the end

    MessageQueue.wait_until_ready = wait_and_remove  # type: ignore[method-assign]


def _remove_rendezvous_names() -> None:
    """Makes vLLM's processes find one another by a file without a name, in the memory of the generator. By default each
    engine leaves one in the folder of temporary files."""
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    def make_file() -> str:
        # Open as long as the generator runs: communicators that are made later look into it.
        return f"file:///proc/{os.getpid()}/fd/{os.memfd_create('asyncrl-rendezvous')}"

    multiproc_executor.get_file_store_init_method = make_file  # pyright: ignore[reportPrivateImportUsage]
    uniproc_executor.get_file_store_init_method = make_file  # pyright: ignore[reportPrivateImportUsage]


def _remove_communicator_names() -> None:
    """Does the same for the memory in which workers on a CPU exchange tensors, which vLLM never removes."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    join = inspect.unwrap(_CPUSHMDistributed._init_cpu_shm)

    @wraps(join)
    def join_and_remove(communicator: Any) -> int:
        handle = join(communicator)  # ends with a barrier
        for file in SHARED_MEMORY.glob(f"{communicator.group_name.replace('[', '[[]')}_*"):
            with suppress(FileNotFoundError):  # each worker removes the rest
                file.unlink()
        return handle

    _CPUSHMDistributed._init_cpu_shm = join_and_remove  # type: ignore[method-assign]
