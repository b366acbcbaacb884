"""Episodes whose conversations are rendered before each turn, with real hosts and a real engine: what was sampled is
trained once, in the row whose prompt the policy has read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from generator_model import deterministic_engine
from test_dialogue_episodes import ENVIRONMENT, GROUPS, MESSAGES, TURNS, run
from test_episodes import hf_logprobs
from transformers import Qwen2ForCausalLM

from asyncrl.environments.dialogue.dialogue import ChatDialogue
from asyncrl.generator.engine import Engine
from asyncrl.util.model_files import load_tokenizer
from tests.helpers.chat_models import THINKING
from tests.helpers.talking_models import save_talking_model

TEXTS = ["<think>\nI think so.\n</think>\n\nfollow the answer", "<think>\nhello\n</think>\n\nyellow", "hello"]


@pytest.fixture(scope="module")
def thinking_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("thinking-model")
    save_talking_model(folder, TEXTS, template=THINKING)
    return str(folder)


@pytest.fixture(scope="module")
def thinking_engine(thinking_path: str) -> Iterator[Engine]:
    with deterministic_engine(thinking_path) as engine:
        yield engine


def test_each_turn_is_trained_once_behind_what_the_template_renders(
    thinking_path: str, thinking_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "echo.py").write_text(ENVIRONMENT)
    groups, recorded = run(thinking_path, thinking_engine, "echo.py:Echo", history="template")
    policy = Qwen2ForCausalLM.from_pretrained(thinking_path, dtype=torch.float32).eval().requires_grad_(False)
    dialogue = ChatDialogue(thinking_path, trust_remote_code=False, max_observation_tokens=100)
    tokenizer, rows, worst = load_tokenizer(thinking_path), 0, 0.0
    for group in groups:
        assert len(group.firsts) == 2 and set(group.members) == {0, 1}, "group statistics are over members"
        for member in range(2):
            own = [row for row in group.trajectories if row.member == member]
            keys = [key for key in recorded.prompts if key.partition("/")[0] == f"{group.ticket}.0.{member}"]
            assert keys == [
                f"{group.ticket}.0.{member}",
                *(f"{group.ticket}.0.{member}/{n}" for n in range(1, len(own))),
            ]
            messages, sampled = list(MESSAGES), list[int]()
            for row, key in zip(own, keys, strict=True):
                trained = np.zeros(len(row.tokens), dtype=np.bool_)
                for prompt, completion in zip(recorded.prompts[key], recorded.sampled[key], strict=True):
                    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
                    assert tokenizer.decode(prompt) == text
                    assert row.tokens[: len(prompt)].tolist() == prompt
                    span = slice(len(prompt), len(prompt) + len(completion.tokens))
                    assert row.tokens[span].tolist() == completion.tokens
                    trained[span] = True
                    sampled += completion.tokens
                    message = dialogue.read(completion.tokens, ()).message
                    said = f"{len(message['content'])} <|im_end|> {len(messages) // 2 - 1}"
                    messages += [message, {"role": "user", "content": said}]
                assert np.array_equal(row.action_mask, trained)
                expected = hf_logprobs(policy, row.tokens)[row.action_mask[1:]]
                worst = max(worst, float(np.abs(row.behavior_logprobs[row.action_mask] - expected).max()))
            assert sum(row.num_action_tokens for row in own) == len(sampled)
            assert [reward for row in own if row.episode for reward in row.episode.turn_rewards] == [0.5] * TURNS
            rows += len(own)
    assert worst <= 1e-5
    assert GROUPS * 2 < rows <= GROUPS * 2 * TURNS, "some turns think and some do not"
