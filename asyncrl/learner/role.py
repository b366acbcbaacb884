"""Sets up and runs a learner rank, on the batches of a run or of its journal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from asyncrl.colocate import DeviceLock, LearnerTurn, NoLock, device_path
from asyncrl.config.config import Config
from asyncrl.errors import RunError
from asyncrl.learner.algorithm import make_algorithm
from asyncrl.learner.checkpoint import CHECKPOINTS, Checkpoints
from asyncrl.learner.critic import Critic, RemoteCritic
from asyncrl.learner.distributed import Ranks, enable_determinism, process_group
from asyncrl.learner.loop import Learner
from asyncrl.learner.model.model_checks import MismatchCheck
from asyncrl.learner.step import Trainer
from asyncrl.observe.samples import SampleBook
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.rpc import announce
from asyncrl.wire.store import StoreServer

if TYPE_CHECKING:
    from asyncrl.weights.background import BackgroundSender
    from asyncrl.weights.layout import WeightManifest

log = structlog.get_logger()


def run_learner(
    config: Config, *, rank: int, endpoints: Endpoints, run_dir: Path, should_stop: Callable[[], bool]
) -> None:
    """Runs one learner rank: loads the model or the newest checkpoint, trains, and writes the model to `run_dir/model`.

    Returns when all steps are done or the run is stopping. Raises an AsyncrlError if training cannot continue.
    """
    from asyncrl.observe.trackers import make_trackers
    from asyncrl.replay.client import LearnerClient

    launch = config.launch
    with _training(config, rank, endpoints, run_dir, shares_card=launch.colocated) as (
        trainer, checkpoints, parts, card,
    ):  # fmt: skip
        start = checkpoints.newest()
        if start:
            trainer.restore(checkpoints.path(start))
            log.info("checkpoint loaded", path=str(checkpoints.path(start)))
        trainer.mismatch_check = MismatchCheck(config, trainer.ranks, trainer.policy.model.config.model_type)
        client = LearnerClient(endpoints, rank, timeout_s=launch.progress_timeout_s)
        parts.callback(client.close)
        trackers = book = None
        if rank == 0:
            trackers = parts.enter_context(make_trackers(config, run_dir))
            book = SampleBook(run_dir) if config.observe.samples else None
        sender = _make_sender(config, trainer, endpoints, run_dir, parts)
        parts.callback(sender.close)
        Learner(
            config, trainer, client, sender, trackers, run_dir, checkpoints, start, book=book, card=card
        ).run(should_stop)  # fmt: skip


def _make_sender(
    config: Config, trainer: Trainer, endpoints: Endpoints, run_dir: Path, parts: ExitStack
) -> BackgroundSender:
    """The sender of this rank's weights: to the generators, or to a store."""
    from asyncrl.weights.layout import WeightManifest
    from asyncrl.weights.ranks import RankShareSender
    from asyncrl.weights.sender import WeightSender
    from asyncrl.weights.transports import goes_by_files, transport_of

    policy = trainer.policy
    manifest = WeightManifest.of(policy.sent_shapes(), base="" if policy.adapters is None else policy.adapters.base)
    if goes_by_files(config):
        return _make_file_sender(config, trainer.ranks, manifest, endpoints, run_dir, parts)
    ranks = trainer.ranks
    options: dict[str, Any] = {
        "timeout_s": config.weights.timeout_s,
        "start_timeout_s": config.launch.start_timeout_s,
        "device": str(ranks.device),
        "copies": config.weights.staging != "buckets",
    }
    if ranks.rank:
        return RankShareSender(manifest, endpoints, rank=ranks.rank, ranks=ranks.count, **options)
    sender = WeightSender(
        endpoints.listening(endpoints.weights),
        manifest,
        ranks=ranks.count,
        expected_generators=config.launch.generators,
        transport=transport_of(config),
        run_id=endpoints.run_id,
        keys=endpoints.keys,
        **options,
    )
    announce(endpoints, endpoints.weights, sender.address)
    return sender


def _make_file_sender(
    config: Config, ranks: Ranks, manifest: WeightManifest, endpoints: Endpoints, run_dir: Path, parts: ExitStack
) -> BackgroundSender:
    """The sender of this rank's slices; rank 0 publishes what all have written."""
    from asyncrl.replay.client import Announcer
    from asyncrl.weights.file_transport import FileSender, RankFileSender, Written, store_url
    from asyncrl.weights.ranks import RankCoordinator

    url, timeout_s, device = store_url(config, run_dir), config.weights.timeout_s, str(ranks.device)
    if ranks.rank:
        return RankFileSender(
            manifest,
            url,
            endpoints,
            rank=ranks.rank,
            ranks=ranks.count,
            timeout_s=timeout_s,
            start_timeout_s=config.launch.start_timeout_s,
            device=device,
        )
    others = None
    if ranks.count > 1:
        address = endpoints.listening(endpoints.weights)
        store = StoreServer(address, "shares of weights", run_id=endpoints.run_id, keys=endpoints.keys)
        parts.callback(store.close)
        announce(endpoints, endpoints.weights, store.channel.address)
        others = RankCoordinator(store, ranks.count - 1, Written, timeout_s=timeout_s)
    announcer = Announcer(endpoints, timeout_s=config.launch.progress_timeout_s)
    parts.callback(announcer.close)
    return FileSender(
        manifest,
        url,
        announcer.announce,
        run_id=endpoints.run_id,
        timeout_s=timeout_s,
        epoch=endpoints.epoch,
        device=device,
        keeps=config.evaluates,
        others=others,
    )


def run_offline(
    config: Config,
    *,
    rank: int,
    endpoints: Endpoints,
    run_dir: Path,
    out_dir: Path,
    should_stop: Callable[[], bool],
    start: int = 0,
    samples: Path | None = None,
) -> None:
    """Runs one learner rank on the batches in the journal of the run in `run_dir`, or on the samples in a file, without
    generators.

    Starts from the model, or from the run's checkpoint of step `start`, and writes metrics and the model to
    `out_dir`. Raises an AsyncrlError if training cannot continue.
    """
    from asyncrl.observe.trackers import make_trackers
    from asyncrl.replay.history import JournalBatches, SampleBatches

    with _training(config, rank, endpoints, run_dir) as (trainer, checkpoints, parts, _):
        if start:
            if not checkpoints.is_intact(start):
                raise RunError(
                    f"start = {start}: {checkpoints.path(start)} is not a complete checkpoint; use the step of a "
                    "complete one, or 0 for the initial model of the run"
                )
            trainer.restore(checkpoints.path(start))
        kind, source = (SampleBatches, samples) if samples else (JournalBatches, run_dir / "journal")
        batches = kind(source, config.shard_of(rank), ranks=config.num_shards)
        parts.callback(batches.close)
        trackers = None
        if rank == 0:
            trackers = parts.enter_context(make_trackers(config, out_dir))
        Learner(config, trainer, batches, None, trackers, out_dir, None, start).run(should_stop)


@contextmanager
def _training(
    config: Config, rank: int, endpoints: Endpoints, run_dir: Path, *, shares_card: bool = False
) -> Iterator[tuple[Trainer, Checkpoints, ExitStack, NoLock]]:
    """Yields this rank's trainer, the checkpoints in `run_dir`, an exit stack for objects to close at the end, and its
    card, which it has already."""
    launch = config.launch
    if config.deterministic:
        enable_determinism()
    algorithm = make_algorithm(config)
    with (
        process_group(
            endpoints,
            rank,
            launch.learners,
            start_timeout_s=launch.start_timeout_s,
            timeout_s=launch.progress_timeout_s,
            sequence_parallel=config.learner.sequence_parallel,
        ) as ranks,
        ExitStack() as parts,
    ):
        card = NoLock()
        if shares_card:
            lock = DeviceLock(device_path(run_dir, rank), f"learner-{rank}")
            parts.callback(lock.leave)
            card = LearnerTurn(config, ranks, lock)
        critic: Critic | RemoteCritic | None = None
        others: tuple[str, ...] = ()
        if algorithm.needs_critic and config.critic.ranks:
            critic = RemoteCritic(config, rank, endpoints)
            others = critic.parts
            parts.callback(critic.close)
        elif algorithm.needs_critic:
            critic = Critic(config, ranks)
        trainer = Trainer(config, ranks, algorithm, critic)
        checkpoints = Checkpoints(config, run_dir / CHECKPOINTS, ranks, others=others)
        parts.callback(checkpoints.close)
        yield trainer, checkpoints, parts, card
