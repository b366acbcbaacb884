"""The ends of completions: texts of `generator.stop`, and no sooner than `generator.min_new_tokens`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from generator_model import EOS, run_all, small_config, weights_of
from transformers import Qwen2ForCausalLM

from asyncrl.errors import InvariantError
from asyncrl.generator.engine import Completion, Sampling
from asyncrl.generator.vllm_backend import requests as requests_module
from asyncrl.generator.vllm_backend.engine import VllmEngine
from asyncrl.util.model_files import load_decoder

EngineMaker = Callable[..., VllmEngine]
Policies = list[Qwen2ForCausalLM]
PROMPTS = {str(i): [3 + (7 * i + 5 * j) % 60 for j in range(4 + i)] for i in range(8)}
DETERMINISTIC = {"deterministic": True, "replay__max_staleness": 0}
MINIMUM = 8


def complete(engine: VllmEngine, policy: Qwen2ForCausalLM, kind: Sampling = "training") -> dict[str, Completion]:
    engine.swap(engine.version + 1, weights_of(policy))
    seeded = engine._config.deterministic
    for key, prompt in PROMPTS.items():
        engine.add(key, prompt, kind=kind, seed=100 + int(key) if seeded else None)
    return run_all(engine)


def test_a_stop_text_ends_a_completion_at_the_token_that_completes_it(
    make_engine: EngineMaker, policies: Policies, model_path: str
) -> None:
    decoder = load_decoder(model_path)

    def decode(tokens: list[int]) -> str:
        return decoder([tokens], special_tokens=True)[0]

    free = complete(make_engine(**DETERMINISTIC), policies[0])
    stop = [decode(completion.tokens[2:4]) for completion in free.values() if len(completion.tokens) > 4]
    assert len(stop) > 4 and all(len(text) == 3 for text in stop)  # two characters with a space between
    engine = make_engine(**DETERMINISTIC, generator__stop=stop)
    for kind in ("training", "evaluation"):
        for key, completion in complete(engine, policies[0], kind).items():
            tokens = free[key].tokens
            ends = [n for n in range(1, len(tokens) + 1) if any(text in decode(tokens[:n]) for text in stop)]
            length = min([*ends, len(tokens)])
            assert completion.tokens == tokens[:length]
            assert completion.logprobs.tobytes() == free[key].logprobs[:length].tobytes()
            assert np.all(completion.versions == engine.version) and len(completion.versions) == length
            assert completion.status == ("completed" if ends else free[key].status)
    assert engine.num_running == 0


def test_a_text_of_one_request_ends_this_request_only(
    make_engine: EngineMaker, policies: Policies, model_path: str
) -> None:
    free = complete(make_engine(**DETERMINISTIC), policies[0])
    key = next(key for key, completion in free.items() if len(completion.tokens) > 4)
    text = load_decoder(model_path)([free[key].tokens[2:4]])[0]
    engine = make_engine(**DETERMINISTIC)
    engine.swap(0, weights_of(policies[0]))
    for name, stop in (("with", [text]), ("without", [])):
        engine.add(name, PROMPTS[key], seed=100 + int(key), stop=stop)
    ended = run_all(engine)
    assert ended["with"].tokens == free[key].tokens[:4] and ended["with"].status == "completed"
    assert ended["without"].tokens == free[key].tokens


def test_a_special_token_is_a_stop_text(make_engine: EngineMaker, policies: Policies) -> None:
    engine = make_engine(**DETERMINISTIC, generator__stop="<pad>", generator__max_new_tokens=200)
    ended = [completion.tokens[-1] for completion in complete(engine, policies[0]).values()]
    assert 0 in ended


def masked_logprobs(policy: Qwen2ForCausalLM, prompt: list[int], tokens: list[int], minimum: int) -> np.ndarray:
    """[tokens], of the distribution without the end tokens before the minimum."""
    logits = policy(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logits[:minimum, EOS] = -torch.inf
    return logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()


def test_before_the_minimum_no_token_ends_and_logprobs_are_those_of_the_others(
    make_engine: EngineMaker, policies: Policies
) -> None:
    engine = make_engine(generator__min_new_tokens=MINIMUM, generator__stop=["!", "#", "$", "%", "&"])
    decoded = {3: "!", 5: "#", 6: "$", 7: "%", 8: "&"}  # the tokens of the texts
    done = [complete(engine, policies[0]) for _ in range(6)]
    lengths = [len(completion.tokens) for one in done for completion in one.values()]
    assert min(lengths) > MINIMUM - 1 and len(set(lengths)) > 2
    early = [token for one in done for completion in one.values() for token in completion.tokens[:MINIMUM]]
    assert not set(EOS) & set(early)
    assert set(decoded) & set(early), "a stop text before the minimum ends nothing"
    differences: list[float] = []
    for key, completion in (pair for one in done for pair in one.items()):
        own = masked_logprobs(policies[0], PROMPTS[key], completion.tokens, MINIMUM)
        assert np.abs(completion.logprobs - own).max() < 1e-4
        differences.append(np.abs(own - masked_logprobs(policies[0], PROMPTS[key], completion.tokens, 0)).max())
    assert max(differences) > 1e-2


def test_other_end_tokens_than_the_learner_has_are_refused(
    model_path: str, monkeypatch: pytest.MonkeyPatch, make_engine: EngineMaker
) -> None:
    engine = make_engine(generator__min_new_tokens=MINIMUM, generator__stop=["!", "#", "$", "%", "&"])
    monkeypatch.setattr(requests_module, "end_tokens", lambda *_, **__: [1])
    with pytest.raises(InvariantError, match=r"ends completions with the tokens \[1, 2\], the learner expects \[1\]"):
        engine._builder.check_end_tokens()
    assert small_config(model_path).generator.stop_texts == []
