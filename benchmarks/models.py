"""`python -m benchmarks.models`: which model families the learner can pack and the engine can follow, as a table."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.config import Config, load_config
from asyncrl.errors import ConfigError
from asyncrl.generator.engine import Completion, Engine
from asyncrl.generator.sent_weights import SentWeights
from asyncrl.learner.batch import make_batch
from asyncrl.learner.models import load_policy_model
from asyncrl.learner.packing_check import check_packing
from asyncrl.learner.policy import PolicyNetwork
from asyncrl.types import Group, Trajectory
from benchmarks.families import FAMILIES, VOCABULARY, save_family

NO_ENGINE = (ValueError, RuntimeError, NotImplementedError, AssertionError, AttributeError, KeyError, TypeError)
"""What vLLM raises for models that it cannot run."""
PROMPTS = [[3 + (7 * i + 5 * j) % (VOCABULARY - 3) for j in range(4 + 3 * i)] for i in range(6)]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between the engine's log-probs of what it sampled and the learner's of the same tokens, in nats."""

    start: float
    """Largest, with the weights that both read from the folder."""
    swapped: float
    """Largest, with other weights that went from the learner into the running engine."""
    mean: float
    """The larger mean of the absolute differences, of both."""

    def agrees(self, dtype: str) -> bool:
        """True if they differ by no more than rounding. A router that chooses another expert for some token in bfloat16
        makes the largest difference large, but not the mean."""
        return max(self.start, self.swapped) < 1e-4 if dtype == "float32" else self.mean < 0.1


def family_config(folder: Path, dtype: str) -> Config:
    return load_config(
        None,
        {
            "model.path": str(folder),
            "model.dtype": dtype,
            "data.train": "unused.parquet",
            "generator.group_size": 2,
            "generator.max_running_groups": 4,
            "generator.max_new_tokens": 24,
            "generator.max_model_tokens": 256,
            "generator.kv_cache_bytes": 16 << 20,
        },
    )


def compare(engine: Engine, network: PolicyNetwork) -> Comparison:
    """Samples with the engine's own weights, then with others, and scores both in packed rows of the network."""
    engine.use_own_weights(0)
    start = differences(engine, network)
    disturb(network.model)
    engine.swap(1, [(name, weight.detach()) for name, weight in network.model.named_parameters()])
    swapped = differences(engine, network)
    return Comparison(
        float(start.abs().max()), float(swapped.abs().max()), max(float(d.abs().mean()) for d in (start, swapped))
    )


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    """Changes every weight by a third of the usual."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.add_(0.3 * noise * parameter.std().nan_to_num(0.1).clamp(min=0.05))


@torch.no_grad()
def differences(engine: Engine, network: PolicyNetwork) -> Tensor:
    """Of the log-probs of all sampled tokens, nats."""
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt)
    done: dict[str, Completion] = {}
    while engine.num_running:
        done |= {completion.key: completion for completion in engine.step()}
    trajectories = [trajectory(prompt, done[str(index)]) for index, prompt in enumerate(PROMPTS)]
    (micro,) = make_batch([Group(0, 0, 0, 0, "", 0, 0, trajectories)], tokens_per_microbatch=10_000).micro_batches
    return network(micro)[0] - micro.behavior_logprobs


def trajectory(prompt: list[int], completion: Completion) -> Trajectory:
    before = np.zeros(len(prompt))
    return Trajectory(
        tokens=np.array(prompt + completion.tokens, dtype=np.int32),
        action_mask=np.concatenate([before, np.ones(len(completion.tokens))]).astype(bool),
        behavior_logprobs=np.concatenate([before, completion.logprobs]).astype(np.float32),
        versions=np.concatenate([before - 1, completion.versions]).astype(np.int32),
        status=completion.status,
    )


def main(names: list[str]) -> None:
    """Prints the table's rows as they are measured; all families, or those of these names."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print("| model type | packed rows | engine = learner | float32, start | float32, swapped | bfloat16, mean |")
    print("|---|---|---|---|---|---|")
    for name in names or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            save_family(name, Path(folder))
            packed = packs(Path(folder))
            cells = engine_cells(Path(folder)) if packed == "yes" else ["", "", "", ""]
            print(f"| {name} | {packed} | {' | '.join(cells)} |", flush=True)


def packs(folder: Path) -> str:
    """Whether the learner takes the model, or why not."""
    try:
        network = load(folder, "float32")
        with torch.no_grad():
            check_packing(network.model, network, torch.device("cpu"), "model.path")
    except ConfigError as error:
        text = str(error)
        found = re.search(r"differ by \S+|models with [^:]* cannot|\((\w+Error)", text)
        return f"no: {found.group(0).strip('(') if found else text}"
    return "yes"


def load(folder: Path, dtype: str) -> PolicyNetwork:
    return PolicyNetwork(load_policy_model(family_config(folder, dtype), str(folder)), 1.0).eval()


def engine_cells(folder: Path) -> list[str]:
    """Whether engine and learner agree, or why not, and the differences in both precisions."""
    try:
        found = compare_model(folder, ["float32", "bfloat16"])
    except (ConfigError, *NO_ENGINE) as error:
        return [f"no: {type(error).__name__}: {str(error).splitlines()[0]}", "", "", ""]
    agrees = all(comparison.agrees(dtype) for dtype, comparison in found.items())
    single = found["float32"]
    return ["yes" if agrees else "no", f"{single.start:.0e}", f"{single.swapped:.0e}", f"{found['bfloat16'].mean:.3f}"]


def compare_model(folder: Path, dtypes: list[str]) -> dict[str, Comparison]:
    """By dtype, of an engine over the folder's model. Raises ConfigError, or what vLLM raises, when the model cannot be
    used. An engine may change the model's classes for the process: nothing can load it here afterwards."""
    networks = {dtype: load(folder, dtype) for dtype in dtypes}
    configs = {dtype: family_config(folder, dtype) for dtype in dtypes}
    sent = SentWeights(configs[dtypes[0]])
    found: dict[str, Comparison] = {}
    for dtype in dtypes:
        engine = Engine(configs[dtype], seed=1, sent=sent)
        try:
            found[dtype] = compare(engine, networks[dtype])
        finally:
            engine.close()
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
