"""The generator's process: reward workers, weight receiver, engine and client, then the loop (`loop.py`)."""

from __future__ import annotations

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
from asyncrl.wire.endpoints import Endpoints

if TYPE_CHECKING:
    from asyncrl.weights.receiver import BackgroundReceiver

log = structlog.get_logger()

_MARGIN = 5
"""Allowance for weights in float32 that files hold in 8 bits, for padding, and for tied heads that files hold once."""
_LEAST_BYTES = 1 << 20


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
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
        receiver = make_receiver(config, index, endpoints, run_dir, device=device)
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
        receiver.engine_is_up(engine.loader if config.weights.staging == "buckets" else None)
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
    from asyncrl.weights.file_transport import FileReceiver, store_url
    from asyncrl.weights.model_tensors import fingerprint_of
    from asyncrl.weights.receiver import WeightReceiver
    from asyncrl.weights.transports import goes_by_files

    timeout_s, max_bytes = config.weights.timeout_s, max_weight_bytes(config.model.path)
    base = fingerprint_of(config.model.path) if config.learner.lora.rank else ""
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


def max_weight_bytes(model_path: str) -> int:
    """Returns an upper bound of the bytes of the model's weights in transfer, at any precision, or of its adapters: the
    most a learner may announce. Raises ConfigError for a model without safetensors files."""
    num_bytes = sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors"))
    if not num_bytes:
        raise ConfigError(
            f"model.path = {model_path!r}: no weights in *.safetensors files; save the model in that format"
        )
    return _MARGIN * num_bytes + _LEAST_BYTES
