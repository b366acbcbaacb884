"""`python -m scripts.what_runs_where` prints the README's table of what was shown to work on which device, and the
table of GPU figures in `docs/performance.md`.

A feature is proven on a CPU by tests of `make test` or `make test-all`, and on a GPU by checks of `make gpu-check` that
passed there; their results are files of `benchmarks/results/`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WRITTEN_ONLY = "written only"


@dataclass(frozen=True)
class Feature:
    """Something that users may want to run, and what shows that it works."""

    name: str
    cpu: str
    """The test that shows it on a CPU, as a file below `tests`; empty if it needs a GPU."""
    gpu: tuple[str, ...] = ()
    """The GPU checks that show it, as patterns of their names; empty if there is none."""


FEATURES = (
    Feature(
        "A learner's step: ZeRO 0 to 3, float32 and bfloat16, checkpointing, offload, critic",
        "learner/test_learner_ranks.py",
        ("test_gpu_learner.py::test_a_step_is_that_of_the_cpu*",),
    ),
    Feature(
        "Attention of packed rows by torch's kernel for variable lengths",
        "learner/test_varlen.py",
        ("test_gpu_learner.py::test_attention_is_that_of_float64*",),
    ),
    Feature(
        "Log-probs in float32 of bfloat16 states",
        "learner/test_logprob_head.py",
        ("test_gpu_learner.py::test_logprobs*",),
    ),
    Feature(
        "Several learner ranks, a GPU each; no rank loads the complete model", "learner/test_partitioned_loading.py"
    ),
    Feature(
        "Memory of the learner as predicted",
        "learner/test_predicted_memory.py",
        ("test_gpu_learner.py::test_memory_is_what_the_arithmetic_says*", "test_gpu_figures.py::test_a_step*"),
    ),
    Feature("Memory of a vLLM engine as predicted", "generator/test_predicted_engine_memory.py"),
    Feature(
        "Weights through host memory (gloo)",
        "weights/test_weight_sync.py",
        ("test_gpu_weights.py::test_a_receiver*gloo*",),
    ),
    Feature(
        "Weights from GPU to GPU (NCCL)",
        "weights/test_weight_nccl.py",
        ("test_gpu_weights.py::test_a_receiver*nccl*",),
    ),
    Feature(
        "Versions in buckets into a running engine (`weights.staging`)",
        "weights/test_weights_into_engine.py",
        ("test_gpu_colocated.py::test_the_demo*transformers-ipc*",),
    ),
    Feature("Every learner rank sends its part", "weights/test_weight_ranks.py"),
    Feature("Learner ranks that share long sequences", "learner/test_sequence_parallel.py"),
    Feature(
        "Mixtures of experts, with replay of the engine's experts",
        "learner/test_routing_replay.py",
        ("test_gpu_learner.py::test_experts*", "test_gpu_engine.py::test_a_token_has_the_experts*transformers*"),
    ),
    Feature(
        "The experts of vLLM's tokens for the replay, over swaps",
        "generator/test_engine_routing.py",
        ("test_gpu_engine.py::test_a_token_has_the_experts*vllm*",),
    ),
    Feature(
        "LoRA: trained, sent alone, resumed, exported",
        "system/test_lora_runs.py",
        ("test_gpu_learner.py::test_a_step*lora*", "test_gpu_run.py::test_adapters*transformers*"),
    ),
    Feature(
        "Engine on transformers: log-probs, versions, swaps",
        "generator/test_engine_contract.py",
        ("test_gpu_engine.py::*transformers*",),
    ),
    Feature(
        "Engine on vLLM: log-probs, versions, swaps with a batch in flight",
        "generator/test_engine_contract.py",
        ("test_gpu_engine.py::*vllm*",),
    ),
    Feature("vLLM divided among GPUs (`generator.tensor_parallel`)", "generator/test_tensor_parallel.py"),
    Feature(
        "A complete run with the engine on transformers, all roles on one GPU",
        "system/test_transformers_engine_runs.py",
        ("test_gpu_run.py::*1-transformers*",),
    ),
    Feature(
        "Generator and learner on one card in turn (`launch.colocate`), the engine on transformers",
        "learner/test_colocated.py",
        (
            "test_gpu_colocated.py::*sleeping*transformers*",
            "test_gpu_colocated.py::*leave_the_card*",
            "test_gpu_colocated.py::*transformers-auto*",
        ),
    ),
    Feature(
        "The same with vLLM",
        "system/test_colocated_runs.py",
        ("test_gpu_colocated.py::*sleeping*vllm*", "test_gpu_colocated.py::*vllm-auto*"),
    ),
    Feature(
        "Weights from card memory to card memory (`weights.transport: ipc`)",
        "weights/test_weight_ipc.py",
        ("test_gpu_colocated.py::*versions_go*", "test_gpu_colocated.py::*transformers-ipc*"),
    ),
    Feature(
        "A complete run with vLLM",
        "system/test_runs.py",
        ("test_gpu_run.py::*1-vllm*",),
    ),
    Feature("Roles over several hosts: Ray, SLURM", "system/test_ray.py"),
)


def main() -> None:
    """Prints the tables."""
    print(table(FEATURES, read_results()), figures(read_results()), sep="\n\n")


def read_results() -> list[dict[str, Any]]:
    """The results of all cards, the last measured first."""
    found = [json.loads(file.read_text()) for file in RESULTS.glob("*.json")]
    return sorted((one for one in found if "checks" in one), key=lambda one: one["date"], reverse=True)


def table(features: tuple[Feature, ...], results: list[dict[str, Any]]) -> str:
    """The Markdown table of the features."""
    lines = ["| feature | on a CPU | on a GPU |", "|---|---|---|"]
    for feature in features:
        cpu = f"[tested](tests/{feature.cpu})" if feature.cpu else "needs a GPU"
        lines.append(f"| {feature.name} | {cpu} | {gpu_cell(feature, results)} |")
    return "\n".join(lines)


def gpu_cell(feature: Feature, results: list[dict[str, Any]]) -> str:
    """The cards on which the checks of the feature passed, and when, or how many failed; else that it was written
    only."""
    cards: list[str] = []
    for one in results:
        outcomes = [
            [check["outcome"] for check in one["checks"] if fnmatch(check["name"], name)] for name in feature.gpu
        ]
        card = f"{one['machine']['gpus'][0]}, {one['date']}"
        every = [outcome for own in outcomes for outcome in own]
        if outcomes and all(own and set(own) == {"passed"} for own in outcomes):
            cards.append(card)
        elif failed := every.count("failed"):
            cards.append(f"{failed} of {len(every)} checks failed: {card}")
    return "; ".join(cards) or WRITTEN_ONLY


def figures(results: list[dict[str, Any]]) -> str:
    """The Markdown table of what was measured on each card."""
    found = [{name: value for check in one["checks"] for name, value in check["figures"].items()} for one in results]
    cards = [f"{one['machine']['gpus'][0]}, torch {one['machine']['packages']['torch']}" for one in results]
    lines = [f"| figure | {' | '.join(cards)} |", "|---" * (len(cards) + 1) + "|"]
    for name in dict.fromkeys(name for one in found for name in one):
        lines.append(f"| {name} | {' | '.join(f'{one[name]:,.4g}' if name in one else '' for one in found)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
