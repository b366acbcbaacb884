"""A tiny model, trajectories of all kinds, and a record of training on them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from asyncrl.config.config import Config
from asyncrl.errors import PeerTimeoutError
from asyncrl.launch.fork_server import Forked
from asyncrl.learner.algorithm import make_algorithm
from asyncrl.learner.batch import Batch, make_batch
from asyncrl.learner.critic import Critic
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.engine import TrainedModel
from asyncrl.learner.model.lora import trained_parameters
from asyncrl.learner.step import Trainer
from asyncrl.types import NO_VERSION, Group, Trajectory
from asyncrl.wire.endpoints import Endpoints
from tests.helpers.forked_scripts import fork_script
from tests.helpers.sockets import socket_address

VOCABULARY = 48
NAMES = "names.json"
"""File with the names of the runs that tests need."""
LR = 1e-3
CRITIC: dict[str, Any] = {
    "algorithm": {
        "advantage": "gae",
        "whiten": True,
        "kl_reward_coef": 0.1,
        "kl_loss_coef": 0.1,
        "entropy_coef": 0.1,
    },
    "critic": {"lr": LR},
}
"""Settings with a critic, a reference policy and an entropy bonus."""
GAE_CONFIG: dict[str, Any] = {
    "algorithm": {"advantage": "gae", "loss": "ppo_clip"},
    "critic": {"lr": 1e-3, "ranks": 1},
    "learner": {
        "lr": LR,
        "tokens_per_microbatch": 40,
        "optimizer_options": {"weight_decay": 0.1},
        "epochs": 2,
        "minibatches": 2,
    },
}
"""Settings with a critic in a separate process."""
LORA = {"rank": 4}
STATE_RUNS: dict[str, dict[str, Any]] = {
    "zero0": {"learner": {"zero_stage": 0}, "steps": 4},
    "zero2": {"learner": {"zero_stage": 2}, "steps": 4},
    "zero3": {"learner": {"zero_stage": 3}, "steps": 4},
    "bfloat16-zero1": {"learner": {"zero_stage": 1}, "model": {"dtype": "bfloat16"}, "steps": 4},
    "bfloat16-zero3": {"learner": {"zero_stage": 3}, "model": {"dtype": "bfloat16"}, "steps": 4},
    "offload-zero3": {"learner": {"zero_stage": 3, "offload": "all"}, "steps": 4},
    "lora-zero2": {"learner": {"zero_stage": 2, "lora": LORA}, "steps": 4},
    "lora-zero3": {"learner": {"zero_stage": 3, "lora": LORA, "gradient_checkpointing": True}, "steps": 4},
    "lora-bfloat16-zero3": {
        "learner": {"zero_stage": 3, "lora": LORA, "lr": 1e-2},
        "model": {"dtype": "bfloat16"},
        "steps": 4,
    },
    "lora-offload-zero3": {"learner": {"zero_stage": 3, "offload": "all", "lora": LORA}, "steps": 4},
    "bfloat16-offload": {
        "learner": {"zero_stage": 2, "offload": "optimizer"},
        "model": {"dtype": "bfloat16"},
        "steps": 4,
    },
}
"""Settings with which two ranks save and restore their training state, by name."""
SKIPS: dict[str, dict[str, Any]] = {
    f"{dtype}-zero{stage}-{offload}": {
        "learner": {"zero_stage": stage, "offload": offload},
        "model": {"dtype": dtype},
    }
    for dtype, stage, offload in (
        ("float32", 0, "none"),
        ("float32", 3, "none"),
        ("bfloat16", 2, "none"),
        ("bfloat16", 2, "optimizer"),
        ("float32", 3, "all"),
    )
}
"""Settings with which an update is skipped, by name."""
MAX_GRAD_NORMS = (0.05, 10.0)
"""Maximum norms of the recorded steps: the first step is clipped, the second is not."""


def make_model(folder: Path) -> Path:
    """Writes a random Qwen2 model with tied embeddings, and a tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def make_config(folder: Path, /, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"path": str(folder)},
        "data": {"train": "none.parquet"},
        "generator": {"group_size": 4, "temperature": 0.7, "max_new_tokens": 20},
        "replay": {"groups_per_step": 6, "max_staleness": 2},
        "learner": {"lr": LR, "tokens_per_microbatch": 40, "optimizer_options": {"weight_decay": 0.1}},
        "launch": {"start_timeout_s": 60, "progress_timeout_s": 120},
        "steps": 3,
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section if isinstance(section, dict) else section
    return Config.model_validate(values)


def partitioning(sections: dict[str, Any], threshold: int) -> dict[str, Any]:
    """The sections with parameters of at least `threshold` elements partitioned in ZeRO stage 3."""
    options = {"zero_optimization": {"stage3_param_persistence_threshold": threshold}}
    return sections | {"learner": sections.get("learner", {}) | {"deepspeed_options": options}}


def make_trajectory(rng: np.random.Generator, version: int = 0) -> Trajectory:
    """Returns a trajectory of a prompt, actions, sometimes an environment's tokens between actions, and versions that
    may change within it."""
    prompt, first, tool, second = rng.integers((1, 1, 0, 0), (6, 10, 4, 8))
    mask = np.repeat([False, True, False, True], [prompt, first, tool, second])
    versions = np.where(mask, version + np.sort(rng.integers(-1, 1, len(mask))).clip(-version), NO_VERSION)
    return Trajectory(
        tokens=rng.integers(0, VOCABULARY, len(mask)).astype(np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -rng.gamma(2.0, 1.5, len(mask)), 0.0).astype(np.float32),
        versions=versions.astype(np.int32),
        status="completed",
        reward=float(rng.integers(0, 3)) / 2,
    )


def make_trajectories(rng: np.random.Generator, version: int = 0) -> list[Trajectory]:
    """Returns four trajectories with a common prefix, limited by their prompts."""
    first, *others = (make_trajectory(rng, version) for _ in range(4))
    for other in others:
        common = min(int(first.action_mask.argmax()), int(other.action_mask.argmax()))
        other.tokens[:common] = first.tokens[:common]
    return [first, *others]


def make_groups(count: int = 6, *, seed: int = 0, version: int = 0) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [
        Group(
            ticket=10 + ticket,
            attempt=0,
            generator=0,
            row=ticket,
            data_source="test",
            start_version=version,
            end_version=version,
            trajectories=make_trajectories(rng, version),
        )
        for ticket in range(count)
    ]


def single_groups(lengths: list[int], vocabulary: int) -> list[Group]:
    """Returns groups of one trajectory each, so that no trajectories share a prompt."""
    made: list[Group] = []
    for ticket, length in enumerate(lengths):
        tokens = np.random.default_rng(ticket).integers(0, vocabulary, length).astype(np.int32)
        mask = np.arange(length) > 0
        trajectory = Trajectory(
            tokens=tokens,
            action_mask=mask,
            behavior_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
            versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
            status="completed",
            reward=float(ticket % 2),
        )
        made.append(Group(ticket, 1, 0, ticket, "", 0, 0, [trajectory]))
    return made


def pack_groups(config: Config, groups: Sequence[Group]) -> Batch:
    settings = config.learner
    return make_batch(
        groups,
        tokens_per_microbatch=settings.tokens_per_microbatch,
        minibatches=settings.minibatches,
        bootstrap_truncated=config.algorithm.truncated == "bootstrap",
    )


def make_trainer(config: Config, ranks: Ranks) -> Trainer:
    algorithm = make_algorithm(config)
    return Trainer(config, ranks, algorithm, Critic(config, ranks) if algorithm.needs_critic else None)


def train_steps(trainer: Trainer, steps: Sequence[int]) -> None:
    """Trains the steps on this rank's groups; rank 0 has more groups than rank 1."""
    ranks = trainer.ranks
    for step in steps:
        groups = make_groups(6, seed=step)
        mine = groups if ranks.count == 1 else (groups[:4], groups[4:])[ranks.rank]
        trainer.train(pack_groups(trainer.config, mine), step=step)


def copy_weights(model: TrainedModel) -> dict[str, Tensor]:
    return {name: weight.detach().clone().cpu() for name, weight in model.weights()}


def record(config: Config, ranks: Ranks, groups: Sequence[Group]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Trains two steps on the groups. Returns the weights of versions 0, 1 and 2, the full gradients before clipping,
    and all metrics by step."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, float] = {}
    trainer: Trainer | None = None
    for step, max_grad_norm in enumerate(MAX_GRAD_NORMS, start=1):
        config = config.model_copy(
            update={"learner": config.learner.model_copy(update={"max_grad_norm": max_grad_norm})}
        )
        if trainer is None:
            trainer = make_trainer(config, ranks)
            tensors |= {f"weight/0/{name}": weight for name, weight in copy_weights(trainer.policy).items()}
        trainer.config = config
        with gradients_before_step(trainer.policy) as gradients:
            metrics = trainer.train(pack_groups(config, groups), step=step)
        scalars |= {f"{step}/{name}": value for name, value in metrics.items()}
        tensors |= {f"gradient/{step}/{name}": gradient for name, gradient in gradients.items()}
        tensors |= {f"weight/{step}/{name}": weight for name, weight in copy_weights(trainer.policy).items()}
    return tensors, scalars


@contextmanager
def gradients_before_step(policy: TrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yields a dict that receives the policy's full gradients before each step."""
    gradients: dict[str, Tensor] = {}
    step = policy.step

    def keep(**options: float) -> None:
        for name, parameter in trained_parameters(policy.model):
            gradient = safe_get_full_grad(parameter)
            assert gradient is not None, name
            gradients[name] = gradient.float().clone().cpu()
        step(**options)

    with patch.object(policy, "step", keep):
        yield gradients


class Sender:
    """A sender to nobody. Checks that the weights of a version do not change before `copied`."""

    is_missed = False

    def __init__(self, lost: bool = False) -> None:
        self.sent: dict[int, dict[str, Tensor]] = {}
        self.uncopied: list[tuple[str, Tensor]] = []
        self.lost = lost
        self.stats = SimpleNamespace(count=0, broadcast_s=0.0, wait_s=0.0, dropped=0, bytes=0)
        self.waited = 0

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]], *, copy_later: bool = False) -> None:
        self.copied()
        assert copy_later
        self.uncopied = list(weights)
        self.sent[version] = {name: weight.clone() for name, weight in self.uncopied}

    def copied(self) -> None:
        for name, weight in self.uncopied:
            assert torch.equal(weight, [*self.sent.values()][-1][name])
        self.uncopied = []

    def wait(self) -> None:
        self.waited += 1
        if self.lost:
            raise PeerTimeoutError("generator 0 is gone")


def _start(script: str, arguments: Iterable[object], log: Path, folder: Path) -> Forked:
    """Starts a script of this folder as a process in `folder`, with its output in `log`."""
    with log.open("wb") as output:
        process = fork_script(Path(__file__).parent / script, arguments, output.fileno(), folder)
    process.stdin.close()
    return process


def _end(process: Forked) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def spawn(
    script: str,
    model: Path,
    out: Path,
    port: int,
    *,
    ranks: int,
    timeout_s: float,
    names: Iterable[str] = (),
    code: int = 0,
) -> None:
    """Runs a script of this folder as `ranks` ranks to this exit code, with the output in `out`. The script has its
    runs of these names only."""
    (out / NAMES).write_text(json.dumps(sorted(names)))
    processes = [_start(script, (rank, port, model, out), out / f"{rank}.log", Path.cwd()) for rank in range(ranks)]
    try:
        codes = [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            _end(process)
    logs = [(out / f"{rank}.log").read_text()[-2500:] for rank in range(ranks)]
    assert codes == [code] * ranks, "\n".join(logs)


def wanted(runs: dict[str, dict[str, Any]], out: Path) -> dict[str, dict[str, Any]]:
    """Returns those of a script's runs that `spawn` was called with."""
    names = json.loads((out / NAMES).read_text())
    return {name: sections for name, sections in runs.items() if name in names}


@contextmanager
def running(script: str, model: Path, out: Path, port: int, learners: str = "2") -> Iterator[Forked]:
    """Runs a script of this folder as a process that is killed when the context ends, with the output in `out`."""
    process = _start(script, (port, model, learners), out / script.replace(".py", ".log"), out)
    try:
        yield process
    finally:
        _end(process)


def endpoints(port: int) -> Endpoints:
    return Endpoints("test", "", socket_address(f"weights-{port}"), socket_address(f"learners-{port}"))


def critic_endpoints(port: int) -> Endpoints:
    """Returns endpoints with one critic rank in a separate process."""
    return replace(
        endpoints(port), critic_ranks=socket_address(f"learners-{port}"), critics=(f"tcp://127.0.0.1:{port + 1}",)
    )
