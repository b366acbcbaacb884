"""The engine on transformers: families, pages that run out, kernels, sampling, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generator_model import reference_logprobs, run_all, small_config, weights_of
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from asyncrl.config.sections import Sampling
from asyncrl.errors import ConfigError
from asyncrl.generator.transformers_backend import attention as varlen
from asyncrl.generator.transformers_backend import decoder as sizes
from asyncrl.generator.transformers_backend.attention import padded_attention, table_attention, table_fault
from asyncrl.generator.transformers_backend.cache import HeadShape
from asyncrl.generator.transformers_backend.engine import StopTexts, TransformersEngine, sample
from benchmarks.families import save_family

TOLERANCE = 5e-5
Policies = list[Qwen2ForCausalLM]
CPU = torch.device("cpu")


def make(path: str, **overrides: object) -> TransformersEngine:
    return TransformersEngine(small_config(path, generator__engine="transformers", **overrides), seed=1)


def worst(engine: TransformersEngine, model: Any, prompts: dict[str, list[int]]) -> float:
    """The largest difference of log-probs from the model's own forward pass."""
    for key, prompt in prompts.items():
        engine.add(key, prompt)
    done = run_all(engine)
    assert done.keys() == prompts.keys()
    return max(
        float(np.abs(one.logprobs - reference_logprobs(model, prompts[key], one.tokens, 1.0)).max())
        for key, one in done.items()
    )


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "qwen3_moe", "deepseek_v3", "gpt_neox"])
def test_a_family_decodes_as_its_own_forward_pass_computes(name: str, tmp_path: Path) -> None:
    """Sliding windows, experts, values of another size than keys, and a family that differs in vLLM."""
    engine = make(str(save_family(name, tmp_path)), generator__engine_options={"max_num_batched_tokens": 20})
    engine.use_own_weights(0)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval().requires_grad_(False)
    assert worst(engine, model, {str(i): [3 + (7 * i + 5 * j) % 90 for j in range(4 + 9 * i)] for i in range(6)}) < (
        TOLERANCE
    )
    engine.close()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("qwen3_next", r"its logits differ by .* of their norm from those of its own forward pass"),
        ("mamba", "its attention cannot be replaced"),
        ("gpt_oss", "attention sinks"),
    ],
)
def test_a_model_with_another_state_than_keys_and_values_is_refused(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        make(str(save_family(name, tmp_path)))
    assert "model.path" in str(caught.value)


def test_requests_go_on_when_pages_run_out(
    model_path: str, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(model_path)
    engine.swap(0, weights_of(policies[0]))
    cache, scheduler = engine._decoder.cache, engine._scheduler
    del cache._free[40:]  # of 16 tokens each; eight of the requests want 63
    again: list[str] = []
    release = scheduler._release

    def spy(request: Any) -> None:
        if request.key in engine._requests and request.num_generated < request.max_tokens:
            again.append(request.key)
        release(request)

    monkeypatch.setattr(scheduler, "_release", spy)
    prompts = {str(i): [3 + (7 * i + 5 * j) % 60 for j in range(75 + i)] for i in range(12)}
    assert worst(engine, policies[0], prompts) < TOLERANCE
    assert len(set(again)) > 3 and cache.num_free == 40
    engine.close()


def test_a_cache_that_one_sequence_does_not_fit_is_refused(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "CPU_KV_CACHE_BYTES", 1 << 17)
    with pytest.raises(ConfigError, match=r"512 tokens needs 262,144 bytes .*131,072; raise it, or lower"):
        make(model_path, generator__kv_cache_bytes=None)


def test_a_deterministic_completion_does_not_depend_on_company(model_path: str, policies: Policies) -> None:
    options = {"deterministic": True, "replay__max_staleness": 0}
    found: list[dict[str, tuple[list[int], bytes]]] = []
    for keys in ("0123", "20"):
        engine = make(model_path, **options)
        engine.swap(0, weights_of(policies[0]))
        for key in keys:
            engine.add(key, [5, 6, 7 + int(key)], seed=int(key))
        found.append({key: (one.tokens, one.logprobs.tobytes()) for key, one in run_all(engine).items()})
        engine.close()
    assert {key: found[0][key] for key in found[1]} == found[1]
    assert found[0]["0"][0] != found[0]["1"][0]


@pytest.fixture
def varlen_attn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A stand-in, by its documentation, for the function that torch has on GPUs only. It can align the mask at the
    wrong end, or lack the table of pages."""
    wrong: dict[str, Any] = {"shift": 0, "lacks": ""}

    def attend(
        query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
        *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
    ) -> Tensor:  # fmt: skip
        if wrong["lacks"]:
            raise RuntimeError(wrong["lacks"])
        outputs: list[Tensor] = []
        for row in range(len(cu_q) - 1):
            q = query[cu_q[row] : cu_q[row + 1]]
            count = int(seqused_k[row])
            assert count == cu_k[row + 1] - cu_k[row]
            k, v = (pool[block_table[row]].flatten(0, 1)[:count] for pool in (key, value))
            assert len(q) <= max_q and len(k) <= max_k and (enable_gqa or q.shape[1] == k.shape[1])
            k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for one in (k, v))
            last = torch.arange(len(q))[:, None] + (len(k) - len(q)) * (not wrong["shift"])
            seen = torch.arange(len(k)) <= last + window_size[1]
            if window_size[0] >= 0:
                seen &= torch.arange(len(k)) >= last - window_size[0]
            scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * (scale or q.shape[2] ** -0.5)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype))
        return torch.cat(outputs)

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    yield wrong.update


def test_the_kernel_of_variable_lengths_gets_the_lengths_and_pages_of_the_batch(
    varlen_attn: Any, model_path: str, policies: Policies, monkeypatch: Any
) -> None:
    """That torch's own kernel does what the stand-in does only a GPU can show; an engine tries it when it starts."""
    assert table_fault({HeadShape(2, 32, 32)}, 4, dtype=torch.bfloat16, device=CPU) == ""
    monkeypatch.setattr(sizes, "choose_kernel", lambda *_, **__: (table_attention, varlen.LARGE_PAGE_TOKENS))
    engine = make(model_path, generator__engine_options={"max_num_batched_tokens": 16})
    engine.swap(0, weights_of(policies[0]))
    prompts = {str(i): [3 + (7 * i + 5 * j) % 60 for j in range(250 + 3 * i)] for i in range(10)}
    assert worst(engine, policies[0], prompts) < TOLERANCE
    engine.close()


def test_a_kernel_that_computes_something_else_is_not_used(varlen_attn: Any) -> None:
    shapes = {HeadShape(2, 32, 32)}
    varlen_attn(shift=1)
    fault = table_fault(shapes, 4, dtype=torch.bfloat16, device=CPU)
    assert "differs by" in fault and "window = None" in fault
    varlen_attn(shift=0, lacks="no pages on this GPU")
    assert table_fault(shapes, 4, dtype=torch.bfloat16, device=CPU) == "RuntimeError: no pages on this GPU"
    assert varlen.choose_kernel({0: HeadShape(2, 32, 32)}, 4, dtype=torch.bfloat16, device=CPU)[0] is padded_attention


def drawn(logits: list[float], **how: float) -> tuple[set[int], Tensor]:
    """The tokens that are sampled in 400 rows, and the log-probs by token."""
    rows = torch.tensor([logits] * 400)
    generator = torch.Generator().manual_seed(0)
    tokens, logprobs = sample(rows, Sampling(**how), generator)  # type: ignore[arg-type]
    found = torch.full((len(logits),), -torch.inf)
    found[tokens] = logprobs
    return set(tokens.tolist()), found


def test_sampling_excludes_what_it_says_and_logprobs_are_of_what_is_left() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    plain = logits.tolist()
    assert drawn(plain)[0] == {0, 1, 2, 3}
    for how, left in (
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.8}, [0, 1]),
        ({"top_p": 0.81}, [0, 1, 2]),
        ({"min_p": 0.2}, [0, 1, 2]),
        ({"temperature": 0.0}, [0]),
        ({"top_k": 3, "top_p": 0.5}, [0]),
    ):
        tokens, found = drawn(plain, **how)
        assert tokens == set(left), how
        if how != {"temperature": 0.0}:
            assert torch.allclose(found[left], logits[left].log_softmax(-1), atol=1e-6), how
    assert torch.allclose(drawn(plain, temperature=0.5)[1], (logits / 0.5).log_softmax(-1), atol=1e-6)


def test_a_text_is_complete_at_its_last_token_and_once(model_path: str) -> None:
    stops = StopTexts(small_config(model_path))
    tokens = [3 + i for i in range(40)]  # ! " # $ ..., decoded with spaces between
    assert [n for n in range(1, 41) if stops.completed(tokens[:n], ["$ %", "nothing"])] == [5]
    assert [n for n in range(1, 41) if stops.completed(tokens[:n], ["!"])] == [1]
    assert [n for n in range(1, 4) if stops.completed([4, 2, 4], ["<end>"]) and n == 2] == []
    assert stops.completed([4, 2], ["<end>"])


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_has_no_cache_and_at_level_2_no_weights(
    level: int, model_path: str, policies: Policies
) -> None:
    engine = make(model_path)
    engine.swap(0, weights_of(policies[0]))

    def cached() -> int:
        return sum(
            tensor.untyped_storage().nbytes() for pair in engine._decoder.cache.layers.values() for tensor in pair
        )

    def weights() -> int:
        storages = (parameter.untyped_storage() for parameter in engine._decoder._model.parameters())
        return sum(storage.nbytes() for storage in storages if storage.resizable())

    # As in memory that is not a file's.
    for parameter in engine._decoder._model.parameters():
        parameter.data = parameter.data.clone()
    before = cached(), weights()
    engine.sleep(level)
    assert (cached(), weights()) == (0, 0 if level == 2 else before[1]) and all(before)
    engine.wake("weights")
    if level == 2:
        engine.swap(1, weights_of(policies[1]))
    engine.wake("cache")
    assert (cached(), weights()) == before
    assert worst(engine, policies[level - 1], {"a": [5, 6, 7]}) < TOLERANCE
    engine.close()
