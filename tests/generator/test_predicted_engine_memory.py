"""The predicted memory of an engine against the measured peak of a real one on this CPU, each in a process of its own.
What only a GPU has (graphs, CUDA context) is not in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_memory import NEW_TOKENS, SEQUENCES
from generator_model import save_tiny_model, small_config
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.launch.memory import Shape, engine_parts

MIB = 1 << 20
TOLERANCE = 0.1


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("hidden", "layers", "cache"), [(512, 8, 64 * MIB), (512, 8, 256 * MIB), (768, 12, 256 * MIB)])
def test_the_prediction_of_an_engine_is_within_a_tenth(hidden: int, layers: int, cache: int, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    save_tiny_model(tmp_path / "tiny")
    sizes: dict[str, Any] = {
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "vocab_size": 8192,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "tie_word_embeddings": True,
    }  # fmt: skip
    Qwen2ForCausalLM(Qwen2Config(**sizes, max_position_embeddings=512)).save_pretrained(tmp_path)
    config = small_config(
        str(tmp_path),
        generator__max_running_groups=SEQUENCES,
        generator__group_size=1,
        generator__max_new_tokens=NEW_TOKENS,
        generator__kv_cache_bytes=cache,
    )
    shape = Shape.read(str(tmp_path))
    assert shape is not None
    predicted = engine_parts(config, shape, on_gpu=False)
    out, script = tmp_path / "peak", Path(__file__).with_name("engine_memory.py")
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
