"""Generator rate inside `asyncrl launch` against vLLM's `LLM.generate`: same model, prompts, batch, lengths, core.

The model is the demo's before its warm start: completions of 1 to 48 tokens. The launched run trains with a learning
rate so small that the lengths stay so, and with a staleness limit so wide that the generator never waits; its weights
are swapped at every step, about once a second. `--short` takes the demo's own model and its answers of 3 tokens, where
the cost per request counts for more than that per token.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

RUN = "bench-generator"
MODEL = Path("demo/bench-model")
RUNNING_GROUPS = 32
NUM_REQUESTS = 8192
GROUP_SIZE = 8
OVERRIDES = [
    "learner.lr=1e-12",
    "replay.max_staleness=1000",
    "replay.no_signal=train",
    f"generator.max_running_groups={RUNNING_GROUPS}",
    f"generator.group_size={GROUP_SIZE}",
]
LONG = [f"model.path={MODEL}", "generator.max_new_tokens=48", "replay.groups_per_step=64", "steps=20"]
SHORT = ["steps=150"]


def inside_launch(core: int, overrides: list[str]) -> dict[str, float]:
    """Tokens/s of generator 0 while it was busy, from the middle of the run, and its swap stalls."""
    cores = sorted(os.sched_getaffinity(0))
    assert core == cores[0], "the launcher gives generators the first cores"
    command = [sys.executable, "-m", "asyncrl.cli", "launch", "--config", "demo", "--run", RUN]
    shutil.rmtree(Path("runs") / RUN, ignore_errors=True)
    subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL, timeout=400)
    rows = [json.loads(line) for line in (Path("runs") / RUN / "metrics.jsonl").read_text().splitlines()]
    first, last = rows[len(rows) // 5], rows[-1]
    busy = [row["generator/busy_s"] for row in (first, last)]
    tokens = last["generator/tokens"] - first["generator/tokens"]
    summary = json.loads((Path("runs") / RUN / "summary.json").read_text())
    return {"tokens_per_s": tokens / (busy[1] - busy[0]), **summary["weight_sync"]}


def bare(core: int, overrides: list[str]) -> dict[str, float]:
    """Tokens/s of `LLM.generate` in a process of its own on the core."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = ["taskset", "-c", str(core), sys.executable, __file__, "--bare", *overrides]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True, timeout=400)
    return json.loads(done.stdout.splitlines()[-1])


def bare_process(overrides: list[str]) -> None:
    """The other side, run by `bare`: prints its rate as JSON."""
    from asyncrl.config import load_config
    from asyncrl.generator.vllm_setup import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    import pyarrow.parquet as pq
    from vllm import LLM, SamplingParams

    config = load_config("demo", overrides)
    llm = LLM(
        model=config.model.path,
        dtype=config.model.dtype,
        enforce_eager=True,
        kv_cache_memory_bytes=config.generator.kv_cache_bytes,
        max_num_seqs=RUNNING_GROUPS * GROUP_SIZE,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        disable_log_stats=True,
        seed=0,
    )
    tokenizer = llm.get_tokenizer()
    rows = pq.read_table(config.data.train_files[0]).column("prompt").to_pylist()
    prompts = [{"prompt_token_ids": tokenizer.encode(row)} for row in rows for _ in range(GROUP_SIZE)]
    prompts = (prompts * (NUM_REQUESTS // len(prompts) + 1))[:NUM_REQUESTS]
    params = SamplingParams(temperature=1.0, max_tokens=config.generator.max_new_tokens, logprobs=0, detokenize=False)
    llm.generate(prompts[:1000], params, use_tqdm=False)
    start_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start_s
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(json.dumps({"tokens_per_s": tokens / seconds}))


def prepare() -> None:
    """Makes data and models that are not there yet."""
    for recipe, path in (("arithmetic", "demo/arithmetic.parquet"), ("tiny-model", "demo/model")):
        if not Path(path).exists():
            subprocess.run([sys.executable, "-m", "asyncrl.cli", "data", recipe, path], check=True, timeout=300)
    if not MODEL.exists():
        from asyncrl.data.tiny_model import make_tiny_model

        make_tiny_model(MODEL, steps=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--short", action="store_true", help="the demo's own model and its answers of 3 tokens")
    parser.add_argument("--bare", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        bare_process(options.bare)
        return
    prepare()
    overrides = OVERRIDES + (SHORT if options.short else LONG)
    core = sorted(os.sched_getaffinity(0))[0]
    rounds = []
    for number in range(options.rounds):
        theirs, ours = bare(core, overrides), inside_launch(core, overrides)
        rounds.append({"ratio": ours["tokens_per_s"] / theirs["tokens_per_s"], "bare": theirs, "launch": ours})
        print(
            f"round {number + 1}: LLM.generate {theirs['tokens_per_s']:,.0f} tok/s, inside launch "
            f"{ours['tokens_per_s']:,.0f} tok/s, ratio {rounds[-1]['ratio']:.3f}, swap {ours['stall_ms_mean']:.1f} ms "
            f"(max {ours['stall_ms_max']:.1f})",
            flush=True,
        )
    result = {
        "row": "generator-short" if options.short else "generator",
        "ratio": statistics.median(item["ratio"] for item in rounds),
        "stall_ms_mean": statistics.median(item["launch"]["stall_ms_mean"] for item in rounds),
        "stall_ms_max": max(item["launch"]["stall_ms_max"] for item in rounds),
        "rounds": rounds,
    }
    print(f"median ratio {result['ratio']:.3f} of {options.rounds} rounds; swap {result['stall_ms_mean']:.1f} ms")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
