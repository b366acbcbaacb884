"""The plug-in that vLLM calls at start-up, through the entry point group `vllm.general_plugins`.

vLLM calls it in every process: the generator's and, with tensor parallelism, in each worker process, which
runs no other code of asyncrl before the model is loaded.
"""

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

GROUP = "vllm.general_plugins"
NAME = "asyncrl"
"""Name of the entry point, and of the weight transfer engine in `WeightTransferConfig`."""
GENERATOR = "ASYNCRL_ENGINE_PID"
"""Environment variable with the process that has an engine of asyncrl: the plug-in leaves other uses of vLLM alone."""
ROUTING = "ASYNCRL_ENGINE_ROUTING"
"""Environment variable that is there if this engine records the experts of tokens."""
SHARED_MEMORY = Path("/dev/shm")


def register() -> None:
    """Registers the weight transfer engine with vLLM and, in a process of an engine of asyncrl, changes what vLLM has
    no option for; idempotent."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            NAME, "asyncrl.generator.vllm_backend.worker_side", "StagedTransferEngine"
        )
    generator = os.environ.get(GENERATOR)
    if generator is None:
        return
    parent = multiprocessing.parent_process()
    if parent is not None and str(parent.pid) == generator:
        _become_worker(int(generator))
    from vllm.platforms import current_platform

    _remove_queue_names()
    _remove_rendezvous_names()
    if ROUTING in os.environ:
        _return_routing()
    if current_platform.is_cpu():
        import torch

        _keep_weights_beside_packed()
        _remove_communicator_names()
        # vLLM would still compile one line of its sampler: the C++ compiler runs for a minute where nothing is cached.
        torch.compiler.set_stance("force_eager")


def _become_worker(generator: int) -> None:
    """Makes this process a worker, which ends with the generator and leaves nothing."""
    from tqdm import tqdm

    end_with_parent(generator)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the workers of an engine are on one machine
    tqdm.set_lock(threading.RLock())  # by default it has a semaphore with a name, which a killed process leaves


def _keep_weights_beside_packed() -> None:
    """Makes vLLM keep the weights in addition to their packed copies on a CPU. By default it drops them, and new
    weights need a layer-wise reload; weights that are kept are overwritten in place and packed again."""
    from vllm.model_executor.layers import utils

    pack = inspect.unwrap(utils.dispatch_cpu_unquantized_gemm)

    @wraps(pack)
    def pack_and_keep(layer: Module, remove_weight: bool) -> None:
        pack(layer, remove_weight=False)

    utils.dispatch_cpu_unquantized_gemm = pack_and_keep


def _return_routing() -> None:
    """Makes vLLM's model runner on a GPU return the experts of every step."""
    from vllm.distributed.aux_output_connector import worker

    from asyncrl.generator.vllm_backend.worker_side import StepRouting

    worker.AuxOutputWorkerConnector = StepRouting  # type: ignore[assignment, misc]


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
