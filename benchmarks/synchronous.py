"""Each side of training alone, in one process: the engine with all of its slots busy, and the trainer on complete
batches.

`benchmarks.worker` runs it as a process pinned to one core: `python -m benchmarks.synchronous SETTING...`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, TypedDict

from benchmarks.worker import answer, instructions

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

    from asyncrl.config.config import Config
    from asyncrl.learner.batch import Batch
    from asyncrl.learner.distributed import Ranks
    from asyncrl.types import Group


class Measured(TypedDict):
    """The work of a side in a time."""

    tokens: float
    seconds: float


class Sides:
    """An engine and a trainer in one process."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        from asyncrl.learner.algorithm import make_algorithm
        from asyncrl.learner.step import Trainer

        self._config = config
        self._trainer = Trainer(config, ranks, make_algorithm(config))
        self._llm = make_llm(config)
        self._prompts = all_prompts(config)
        self._step = self._requests = 0
        self._batch = self._generate()

    def engine(self, seconds: float) -> Measured:
        """Measures the engine alone while all slots are busy: each step samples one token per slot. Completions that
        are not done continue in the next measurement."""
        from vllm import TokensPrompt

        engine = self._llm.llm_engine
        slots = self._config.generator.max_running_groups * self._config.generator.group_size

        def step() -> int:
            while engine.get_num_unfinished_requests() < 2 * slots:
                self._requests += 1
                prompt = TokensPrompt(prompt_token_ids=next(self._prompts))
                engine.add_request(f"alone {self._requests}", prompt, sampling(self._config))
            engine.step()
            return slots

        return _measure(step, seconds)

    def learner(self, seconds: float) -> Measured:
        """Measures the trainer alone, repeatedly on one batch."""

        def step() -> int:
            self._step += 1
            self._trainer.train(self._batch, step=self._step)
            return self._batch.num_tokens

        return _measure(step, seconds)

    def _generate(self) -> Batch:
        from asyncrl.learner.batch import make_batch

        groups = generate(self._llm, self._config, self._prompts)
        return make_batch(groups, tokens_per_microbatch=self._config.learner.tokens_per_microbatch)


def _measure(step: Callable[[], int], seconds: float) -> Measured:
    """Repeats a step, which returns its tokens, for this time."""
    tokens, began_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - began_s) < seconds:
        tokens += step()
    return Measured(tokens=tokens, seconds=elapsed_s)


def make_llm(config: Config) -> LLM:
    """Returns an engine with vLLM's defaults, except for what the model and the device ask for."""
    from vllm import LLM

    return LLM(
        model=config.model.path,
        dtype=config.model.dtype,
        enforce_eager=True,
        kv_cache_memory_bytes=config.generator.kv_cache_bytes,
        max_num_seqs=config.generator.max_running_groups * config.generator.group_size,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        disable_log_stats=True,
        seed=0,
    )


def all_prompts(config: Config) -> Iterator[list[int]]:
    """Yields the token ids of all prompts in an endless loop."""
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{config.model.path}/tokenizer.json")
    rows = pq.read_table(config.data.train_files[0]).column("prompt").to_pylist()
    return cycle([encoding.ids for encoding in tokenizer.encode_batch(rows)])


def sampling(config: Config) -> Any:
    from asyncrl.generator.vllm_backend.engine import sampling_params

    return sampling_params(config, "training")


def generate(llm: LLM, config: Config, prompts: Iterator[list[int]]) -> list[Group]:
    """Generates and returns the groups of one step."""
    from vllm import TokensPrompt

    from asyncrl.types import Group

    size = config.generator.group_size
    chosen = list(islice(prompts, config.replay.groups_per_step))
    requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in chosen for _ in range(size)]
    outputs = llm.generate(requests, sampling(config), use_tqdm=False)
    return [
        Group(n, 0, 0, n, "bench", 0, 0, [trajectory(output) for output in outputs[n * size : (n + 1) * size]])
        for n in range(len(chosen))
    ]


def trajectory(output: RequestOutput) -> Any:
    import numpy as np

    from asyncrl.types import NO_VERSION, Trajectory

    completion, start = output.outputs[0], len(output.prompt_token_ids or [])
    tokens = np.array([*(output.prompt_token_ids or []), *completion.token_ids], dtype=np.int32)
    mask = np.arange(len(tokens)) >= start
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    logprobs[start:] = completion.logprobs.logprobs  # type: ignore[union-attr]
    versions = np.where(mask, 0, NO_VERSION).astype(np.int32)
    return Trajectory(tokens, mask, logprobs, versions, "completed")


def main() -> None:
    from asyncrl.config.load import load_config, parse_override
    from asyncrl.generator.vllm_backend.setup import CONDITIONS, DEFAULTS

    os.environ.update(DEFAULTS | CONDITIONS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "DS_ACCELERATOR": "cpu"})
    from asyncrl.launch.machine import find_port
    from asyncrl.learner.distributed import process_group
    from asyncrl.wire.endpoints import Endpoints

    config = load_config("demo", dict(parse_override(text) for text in sys.argv[1:]))
    endpoints = Endpoints("bench", "", "", learners=f"tcp://127.0.0.1:{find_port()}")
    with process_group(endpoints, 0, 1, start_timeout_s=60, timeout_s=60) as ranks:
        sides = Sides(config, ranks)
        for side, seconds in instructions():
            answer(getattr(sides, side)(seconds))
    os._exit(0)  # vLLM and DeepSpeed share a process group, which both would destroy


if __name__ == "__main__":
    main()
