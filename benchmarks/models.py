"""`python -m benchmarks.models [--engine ENGINE] [FAMILY ...]`: a table of the model families that the learner can
pack, and for which the engine computes the same log-probs."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.generator.engine import Completion, Engine, make_engine
from asyncrl.learner.batch import make_batch
from asyncrl.learner.model.checks import check_packing
from asyncrl.learner.model.loading import load_policy_model
from asyncrl.learner.model.policy import PolicyNetwork
from asyncrl.types import Group, Trajectory
from benchmarks.families import FAMILIES, VOCABULARY, save_family

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    """Prints each row of the table after its measurement, for all families or for those that are named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models")
    parser.add_argument("--engine", default="vllm", help="generator.engine")
    parser.add_argument("families", nargs="*")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print("| model type | packed rows | engine = learner | float32, start | float32, swapped | bfloat16, mean |")
    print("|---|---|---|---|---|---|")
    for name in arguments.families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            save_family(name, Path(folder))
            packed = packs(Path(folder))
            cells = engine_cells(Path(folder), arguments.engine) if packed == "yes" else ["", "", "", ""]
            print(f"| {name} | {packed} | {' | '.join(cells)} |", flush=True)


def packs(folder: Path) -> str:
    """Returns the cell on whether the learner accepts the model, or why not."""
    try:
        network = load(folder, "float32")
        with torch.no_grad():
            check_packing(network.model, network, torch.device("cpu"), "model.path")
    except ConfigError as error:
        text = str(error)
        found = re.search(r"differ by \S+|models with [^:]* cannot|\((\w+Error)", text)
        return f"no: {found.group(0).strip('(') if found else text}"
    return "yes"


def engine_cells(folder: Path, engine: str) -> list[str]:
    """Returns the cells on whether engine and learner agree, or why not, and on the differences in both dtypes."""
    try:
        sampler = partial(sample_apart, engine_name=engine)
        found = {dtype: compare(folder, dtype, sampler) for dtype in ("float32", "bfloat16")}
    except EngineError as error:
        return [f"no: {error}", "", "", ""]
    agrees = all(comparison.agrees(dtype) for dtype, comparison in found.items())
    single = found["float32"]
    return ["yes" if agrees else "no", f"{single.start:.0e}", f"{single.swapped:.0e}", f"{found['bfloat16'].mean:.3f}"]


if __name__ == "__main__":
    main()


NO_ENGINE = (ValueError, RuntimeError, NotImplementedError, AssertionError, AttributeError, KeyError, TypeError)
"""Errors that vLLM raises for models that it cannot run."""
SAMPLING_S = 300.0
"""Deadline for an engine to start, to sample, and to sample again with other weights."""
PROMPTS = [[3 + (7 * i + 5 * j) % (VOCABULARY - 3) for j in range(4 + 3 * i)] for i in range(6)]


class EngineError(Exception):
    """The engine returned no log-probs to compare with; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Absolute differences between the engine's and the learner's log-probs of the tokens that the engine sampled, in
    nats."""

    start: float
    """Largest difference with the weights that both read from the folder."""
    swapped: float
    """Largest difference with other weights, which the running engine received from the learner."""
    mean: float
    """The larger of the two mean differences."""

    def agrees(self, dtype: str) -> bool:
        """True if the differences are explained by rounding. In bfloat16, a router that chooses another expert for a
        token increases the largest difference, but hardly the mean."""
        return max(self.start, self.swapped) < 1e-4 if dtype == "float32" else self.mean < 0.1


def family_config(folder: Path, dtype: str, engine: str = "vllm") -> Config:
    return load_config(
        None,
        {
            "model.path": str(folder),
            "model.dtype": dtype,
            "data.train": "unused.parquet",
            "generator.engine": engine,
            "generator.group_size": 2,
            "generator.max_running_groups": 4,
            "generator.max_new_tokens": 24,
            "generator.engine_options": {"max_model_len": 256},
            "generator.kv_cache_bytes": 16 << 20,
        },
    )


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    """Adds noise to every weight, of a third of its usual size."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.add_(0.3 * noise * parameter.std().nan_to_num(0.1).clamp(min=0.05))


def sample(folder: Path, dtype: str, disturbed: Path, engine_name: str = "vllm") -> list[list[Completion]]:
    """Returns an engine's completions of PROMPTS with the folder's model: with the model's own weights, and after a
    swap to those in the file `disturbed`. Raises ConfigError or one of NO_ENGINE if the engine cannot run the model."""
    engine = make_engine(family_config(folder, dtype, engine_name), seed=1)
    try:
        engine.use_own_weights(0)
        before = complete(engine)
        engine.swap(1, list(load_file(disturbed).items()))
        return [before, complete(engine)]
    finally:
        engine.close()


def sample_apart(folder: Path, dtype: str, disturbed: Path, engine_name: str = "vllm") -> list[list[Completion]]:
    """Returns the result of `sample` in a separate process, like a generator: vLLM runs some families with classes of
    transformers, which it patches for the complete process. Raises EngineError if that process fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([engine_name, "benchmarks.models"])  # libraries are named as their engines
    answers, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, folder, dtype, disturbed, engine_name))
    process.start()
    sender.close()
    try:
        if not answers.poll(SAMPLING_S):
            raise EngineError(f"no answer within {SAMPLING_S:g} s")
        answer = answers.recv()
    except EOFError:
        process.join(SAMPLING_S)
        raise EngineError(f"the engine's process ended with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if isinstance(answer, str):
        raise EngineError(answer)
    return answer


def _answer(sender: Connection, *arguments: Any) -> None:
    try:
        sender.send(sample(*arguments))
    except (ConfigError, *NO_ENGINE) as error:
        sender.send(f"{type(error).__name__}: {str(error).splitlines()[0]}")


def complete(engine: Engine) -> list[Completion]:
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt)
    done: dict[str, Completion] = {}
    while engine.num_running:
        done |= {completion.key: completion for completion in engine.step()}
    return [done[str(index)] for index in range(len(PROMPTS))]


@torch.no_grad()
def differences(completions: list[Completion], network: PolicyNetwork) -> Tensor:
    """Returns the absolute differences of the log-probs of all sampled tokens, in nats. The network scores them in
    packed rows."""
    trajectories = [trajectory(prompt, done) for prompt, done in zip(PROMPTS, completions, strict=True)]
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
        routing=completion.routing,
    )


def load(folder: Path, dtype: str) -> PolicyNetwork:
    config = family_config(folder, dtype)
    return PolicyNetwork(config, load_policy_model(config, str(folder))).eval()


def compare(
    folder: Path, dtype: str, sampler: Callable[[Path, str, Path], list[list[Completion]]] = sample
) -> Comparison:
    """Returns the comparison for the folder's model in this dtype. Raises ConfigError or one of NO_ENGINE if the model
    cannot be used."""
    start, other = load(folder, dtype), load(folder, dtype)
    disturb(other.model)
    disturbed = folder / "disturbed.weights"  # a *.safetensors file would be read as a part of the model
    save_file({name: weight.detach().contiguous() for name, weight in other.model.named_parameters()}, disturbed)
    before, swapped = sampler(folder, dtype, disturbed)
    differ = differences(before, start), differences(swapped, other)
    largest = [float(d.abs().max()) for d in differ]
    return Comparison(*largest, max(float(d.abs().mean()) for d in differ))
