"""A hand-written synchronous loop: vLLM generates the groups of a step, the learner's own code trains on them, and the
weights are loaded into vLLM again. `python -m benchmarks.synchronous STEPS SETTING...` prints JSON.

One process on one core: at any moment only one side would have work on a core of its own. What each side does alone is
measured in it, too: the trainer in the loop, and the engine with all of its slots busy.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from benchmarks.frame import one_thread, output_of

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

    from asyncrl.config import Config
    from asyncrl.types import Group

TIMEOUT_S = 300.0
WARM_STEPS = 1


def synchronous(steps: int, settings: list[str]) -> dict[str, float]:
    """Tokens/s of the loop and of either side, in a process of its own on the first core."""
    core = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", core, sys.executable, "-m", "benchmarks.synchronous", str(steps), *settings]
    environment = one_thread() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "DS_ACCELERATOR": "cpu"}
    printed = output_of("the synchronous loop", command, environment=environment, timeout_s=TIMEOUT_S)
    return json.loads(printed.splitlines()[-1])


def run(steps: int, config: Config) -> dict[str, float]:
    """Tokens/s of the loop after its first steps, and of either side alone."""
    from asyncrl.generator.transfer import STAGING
    from asyncrl.launch.resources import reserve_ports
    from asyncrl.learner.algorithm import make_algorithm
    from asyncrl.learner.batch import make_batch
    from asyncrl.learner.distributed import connected
    from asyncrl.learner.trainer import Trainer
    from asyncrl.types import Endpoints

    port, other = reserve_ports(0, 2)
    endpoints = Endpoints("bench", "", ("127.0.0.1", other), ("127.0.0.1", port))
    with connected(endpoints, 0, 1, start_timeout_s=60, timeout_s=60) as ranks:
        trainer, llm = Trainer(config, ranks, make_algorithm(config)), make_llm(config)
        prompts = all_prompts(config)
        tokens, generate_s, train_s, wall_s = 0, 0.0, 0.0, 0.0
        for step in range(1, WARM_STEPS + steps + 1):
            began_s = time.perf_counter()
            groups = generate(llm, config, prompts)
            generated_s = time.perf_counter()
            batch = make_batch(groups, tokens_per_microbatch=config.learner.tokens_per_microbatch)
            trainer.train(batch, step=step)
            trained_s = time.perf_counter()
            STAGING["weights"] = list(trainer.policy.weights())
            for call, arguments in (
                ("start_weight_update", ()), ("update_weights", ({"key": "weights"},)), ("finish_weight_update", ())
            ):  # fmt: skip
                llm.collective_rpc(call, args=arguments)
            if step > WARM_STEPS:
                tokens += batch.num_tokens
                generate_s += generated_s - began_s
                train_s += trained_s - generated_s
                wall_s += time.perf_counter() - began_s
        return {
            "tokens/s": tokens / wall_s,
            "learner tokens/s": tokens / train_s,
            "generator tokens/s": engine_alone(llm, config, prompts),
        }


def make_llm(config: Config) -> LLM:
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    from asyncrl.generator.vllm_plugin import NAME, register

    register()
    return LLM(
        model=config.model.path,
        dtype=config.model.dtype,
        enforce_eager=True,
        kv_cache_memory_bytes=config.generator.kv_cache_bytes,
        max_num_seqs=config.generator.max_running_groups * config.generator.group_size,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        disable_log_stats=True,
        seed=0,
        weight_transfer_config=WeightTransferConfig(backend=NAME),
    )


def all_prompts(config: Config) -> Iterator[list[int]]:
    """Token ids, again and again."""
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{config.model.path}/tokenizer.json")
    rows = pq.read_table(config.data.train_files[0]).column("prompt").to_pylist()
    return cycle([encoding.ids for encoding in tokenizer.encode_batch(rows)])


def sampling(config: Config) -> Any:
    from asyncrl.generator.vllm_setup import sampling_params

    return sampling_params(config, config.generator.temperature, config.generator.top_p)


def generate(llm: LLM, config: Config, prompts: Iterator[list[int]]) -> list[Group]:
    """The groups of one step."""
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


def engine_alone(llm: LLM, config: Config, prompts: Iterator[list[int]]) -> float:
    """Tokens/s while all slots are busy: each step gives one token to each."""
    from vllm import TokensPrompt

    engine, slots = llm.llm_engine, config.generator.max_running_groups * config.generator.group_size
    for number in range(4 * slots):
        engine.add_request(f"alone {number}", TokensPrompt(prompt_token_ids=next(prompts)), sampling(config))
    started_s, steps = time.perf_counter(), 0
    while engine.get_num_unfinished_requests() >= slots:
        engine.step()
        steps += 1
    return slots * steps / (time.perf_counter() - started_s)


def main() -> None:
    from asyncrl.config import load_config, parse_override
    from asyncrl.generator.vllm_setup import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    config = load_config("demo", dict(parse_override(text) for text in sys.argv[2:]))
    print(json.dumps(run(int(sys.argv[1]), config)), flush=True)
    os._exit(0)  # vLLM and DeepSpeed share a process group that both would end


if __name__ == "__main__":
    main()
