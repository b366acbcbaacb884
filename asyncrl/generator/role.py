"""The generator's process: reward workers, weight receiver, engine and client, then the loop (`loop.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import structlog

from asyncrl.colocate import GeneratorTurn, generator_locks
from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.generator.engine import make_engine
from asyncrl.generator.loop import GeneratorLoop
from asyncrl.replay.client import GeneratorClient
from asyncrl.util.files import read_tensor_descriptions
from asyncrl.util.processes import use_batch_scheduling
from asyncrl.wire.endpoints import Endpoints

if TYPE_CHECKING:
    from asyncrl.weights.receiver import BackgroundReceiver

log = structlog.get_logger()

_BYTES_PER_ELEMENT = 4
_MARGIN = 1.25
"""Allowance for padding, and for tied heads that files hold once and a learner may send twice."""
_LEAST_BYTES = 1 << 20
_TENSORS = 3
"""Query, key and value of a layer may be one tensor."""


def run_generator(
    config: Config,
    *,
    index: int,
    endpoints: Endpoints,
    run_dir: Path,
    should_stop: Callable[[], bool],
    start: int = 0,
    greedy_baseline: bool = False,
) -> None:
    """Runs one generator process, the `start`-th of this index, until the run ends or the replay queue asks it to
    leave. Raises AsyncrlError when it cannot continue.

    It writes nothing to `run_dir`: groups go to the replay queue.
    """
    import torch

    from asyncrl.environments.pool import EnvironmentPool
    from asyncrl.rewards.pool import RewardPool
    from asyncrl.rewards.reward_model import await_reward_model

    with ExitStack() as stack:
        # Keep all threads on the engine's core: a thread preempted on another core could hold the GIL and stall the
        # engine.
        rewards = None
        if config.has_reward_functions:
            rewards = RewardPool(config, tokenizer_path=config.model.path, endpoints=endpoints, retries=True)
            stack.callback(rewards.close)
        on_gpu = torch.cuda.is_available()
        if not on_gpu:
            try_batch_scheduling()
        receiver = make_receiver(config, index, endpoints, run_dir, device="cuda:0" if on_gpu else "cpu")
        stack.callback(receiver.close)
        receiver.start()  # joins while the engine starts, so that the learners do not wait for it
        locks = generator_locks(config, index, run_dir)
        for lock in locks:
            stack.callback(lock.leave)
            lock.acquire(config.launch.progress_timeout_s)
        log.info("starts", generator=index, doing="building its engine")
        engine = make_engine(config, seed=engine_seed(config.seed, index, start))
        stack.callback(engine.close)
        turn = GeneratorTurn(config, engine, locks) if locks else None
        if (by_buckets := config.weights.staging == "buckets") and engine.loader is None:
            raise ConfigError(
                f"weights.staging = 'buckets': the engine {config.generator.engine!r} has no `loader` "
                "(asyncrl/generator/engine.py); use weights.staging=whole"
            )
        receiver.engine_is_up(engine.loader if by_buckets else None)
        log.info("engine is up", generator=index, doing="joining the run")
        environments = None
        if config.environment.name is not None:
            environments = EnvironmentPool(config, window_tokens=engine.window_tokens, endpoints=endpoints)
            stack.callback(environments.close)
        if endpoints.reward_model:
            await_reward_model(endpoints, timeout_s=config.launch.start_timeout_s, should_stop=should_stop)
        # Long enough for a dead replay process to be restarted.
        client = GeneratorClient(endpoints, index, timeout_s=max(60.0, 2 * config.launch.heartbeat_timeout_s))
        stack.callback(client.close)
        GeneratorLoop(
            config,
            index=index,
            engine=engine,
            rewards=rewards,
            receiver=receiver,
            client=client,
            should_stop=should_stop,
            greedy_baseline=greedy_baseline,
            environments=environments,
            turn=turn,
        ).run()


def make_receiver(
    config: Config, index: int, endpoints: Endpoints, run_dir: Path, *, device: str
) -> BackgroundReceiver:
    """Returns the receiver of the run's weights: from the learner, or from a store."""
    from asyncrl.weights.files import FileReceiver, store_url
    from asyncrl.weights.model_tensors import fingerprint_of
    from asyncrl.weights.receiver import WeightReceiver
    from asyncrl.weights.transports import goes_by_files

    timeout_s, rank = config.weights.timeout_s, config.learner.lora.rank
    max_bytes = max_weight_bytes(config.model.path, adapter_rank=rank)
    base = fingerprint_of(config.model.path) if rank else ""
    if goes_by_files(config):
        return FileReceiver(
            store_url(config, run_dir),
            run_id=endpoints.run_id,
            timeout_s=timeout_s,
            max_bytes=max_bytes,
            base=base,
            device=device,
            keeps=config.evaluates,
        )
    return WeightReceiver(
        "" if endpoints.announces else endpoints.weights,
        rank=index + 1,
        transport=config.weights.transport,
        timeout_s=timeout_s,
        max_bytes=max_bytes,
        base=base,
        device=device,
        keeps=config.evaluates,
        run_id=endpoints.run_id,
        keys=endpoints.keys,
        on_host=config.weights.staging == "host" or config.generator.tensor_parallel > 1,
    )


def engine_seed(seed: int, index: int, start: int) -> int:
    """Returns the engine's seed for the `start`-th start of generator `index`: no two starts draw the same samples."""
    return int(np.random.SeedSequence([seed, index, start]).generate_state(1)[0])


def max_weight_bytes(model_path: str, *, adapter_rank: int = 0) -> int:
    """Returns an upper bound of the bytes of the model's weights in transfer, at any precision, or of adapters of this
    rank if it is not 0: the most a learner may announce. Raises ConfigError when the model's safetensors
    files cannot be read."""
    files = sorted(Path(model_path).glob("*.safetensors"))
    elements = sum(_num_elements(file, adapter_rank) for file in files)
    if not elements:
        raise ConfigError(
            f"model.path = {model_path!r}: no weights in *.safetensors files; save the model in that format"
        )
    return int(elements * _BYTES_PER_ELEMENT * _MARGIN) + _LEAST_BYTES


def try_batch_scheduling() -> None:
    """Calls `use_batch_scheduling`; logs a warning where the system forbids that."""
    try:
        use_batch_scheduling()
    except OSError as error:
        log.warning("no batch scheduling: generators on one core switch often and are slower", reason=str(error))


def _num_elements(file: Path, adapter_rank: int) -> int:
    """Returns the number of elements of all tensors in a safetensors file, or of adapters that each of them could have.
    The model may have a tensor of the file in two or three, with an adapter each."""
    try:
        shapes = [tensor["shape"] for tensor in read_tensor_descriptions(file).values()]
        return sum(_TENSORS * adapter_rank * sum(shape) if adapter_rank else math.prod(shape) for shape in shapes)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: not a complete safetensors file ({type(error).__name__}: {error}); save or download the model "
            "again"
        ) from None
