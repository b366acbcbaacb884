"""The predicted memory of an engine against the measured peak of a real one on this CPU, each in a separate process.
What only a GPU has (graphs, CUDA context) is not in it.

As a script, with the arguments FOLDER CACHE_BYTES OUT, it runs sequences in an engine and writes the peak of the memory
above the peak with a tiny engine, in bytes. The tiny model is in FOLDER/tiny.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generator_model import save_tiny_model, small_config
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.config.config import Config
from asyncrl.generator.vllm_backend.engine import VllmEngine
from asyncrl.launch.memory import Shape, engine_parts
from tests.helpers.memory_peak import Peak, anonymous_bytes, keep_freed_memory_away

MIB = 1 << 20
TOLERANCE = 0.1
SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 64, 64, 32


def make_config(folder: Path, cache_bytes: int) -> Config:
    return small_config(
        str(folder), generator__max_running_groups=SEQUENCES, generator__group_size=1,
        generator__max_new_tokens=NEW_TOKENS, generator__kv_cache_bytes=cache_bytes,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("hidden", "layers", "cache"), [(512, 8, 64 * MIB), (768, 12, 256 * MIB)])
def test_the_prediction_of_an_engine_is_within_a_tenth(hidden: int, layers: int, cache: int, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    save_tiny_model(tmp_path / "tiny")
    sizes: dict[str, Any] = {
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "vocab_size": 8192,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "tie_word_embeddings": True,
    }  # fmt: skip
    Qwen2ForCausalLM(Qwen2Config(**sizes, max_position_embeddings=512)).save_pretrained(tmp_path)
    config = make_config(tmp_path, cache)
    shape = Shape.read(str(tmp_path))
    assert shape is not None
    predicted = engine_parts(config, shape, on_gpu=False)
    out, script = tmp_path / "peak", Path(__file__)
    command = [sys.executable, str(script), str(tmp_path), str(cache), str(out)]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), str(script.parent)])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    measured, total = int(out.read_text()), sum(predicted.values())
    terms = ", ".join(f"{name} {num_bytes / MIB:.0f}" for name, num_bytes in predicted.items() if num_bytes >= MIB)
    line = (
        f"{hidden} x {layers}, cache of {cache / MIB:.0f} MiB: predicted {total / MIB:.0f} MiB, measured "
        f"{measured / MIB:.0f} MiB, {total / measured - 1:+.1%} ({terms})"
    )
    print(line)
    assert abs(total / measured - 1) < TOLERANCE, line


def run(folder: Path, cache_bytes: int) -> VllmEngine:
    engine = VllmEngine(make_config(folder, cache_bytes), seed=1)
    engine.use_own_weights(0)
    rng = np.random.default_rng(0)
    for number in range(SEQUENCES):
        engine.add(str(number), rng.integers(3, 60, PROMPT_TOKENS).tolist())
    while engine.num_running:
        engine.step()
    return engine


def main() -> None:
    keep_freed_memory_away()
    folder, cache_bytes, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    peak = Peak()
    engines = [run(folder / "tiny", 1 << 20)]
    gc.collect()
    keep_freed_memory_away()
    before = anonymous_bytes()
    peak.reset()
    engines.append(run(folder, cache_bytes))
    out.write_text(str(peak.num_bytes - before))
    for engine in engines:
        engine.close()


if __name__ == "__main__":
    main()
