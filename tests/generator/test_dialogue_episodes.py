"""Dialogues under a chat template with real hosts and a real engine: an environment and an agent program with the same
task are trained on the same arrays, in which no turn was encoded again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generator_fakes import lease_reply
from generator_model import deterministic_engine, make_loop, small_config
from test_episodes import Recording, finish, hf_logprobs
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.environments.dialogue.dialogue import Dialogue
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.generator.engine import Engine
from asyncrl.types import Group, Lease, Prompt
from asyncrl.util.model_files import load_tokenizer
from asyncrl.wire.endpoints import Endpoints
from tests.helpers.chat_models import THINKING, save_chat_model
from tests.helpers.talking_models import save_talking_model

GROUPS, TURNS = 8, 3
TEXTS = ["<think>\nI think so.\n</think>\n\nfollow the answer", "<think>\nhello\n</think>\n\nyellow", "hello"]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the price of item 12?"}]
ENVIRONMENT = """
from asyncrl.environments import Environment, Step

class Echo(Environment):
    def step(self, action):
        said = f"{len(action.message['content'])} <|im_end|> {action.turn}"
        return Step(said, reward=0.5, done=action.turn == 2)
"""
AGENT = """
import json, urllib.request

def run(task, *, base_url, api_key):
    messages = list(task["prompt"])
    for turn in range(3):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)["choices"][0]["message"]
        said = f"{len(answer['content'] or '')} <|im_end|> {turn}"
        messages += [answer, {"role": "user", "content": said}]
    return 1.5
"""


@pytest.fixture(scope="module")
def chat_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("chat-model")
    save_chat_model(folder)
    tokenizer = load_tokenizer(str(folder))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.1, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def chat_engine(chat_path: str) -> Iterator[Engine]:
    with deterministic_engine(chat_path) as engine:
        yield engine


def run(chat_path: str, engine: Engine, name: str, **settings: object) -> tuple[list[Group], Recording]:
    """The groups of a generator whose episodes are played by real hosts."""
    recording = Recording(engine)
    options: dict[str, Any] = {"deterministic": True, "replay__max_staleness": 0, "environment__name": name}
    options |= {f"environment__{key}": value for key, value in settings.items()}
    config = small_config(chat_path, **options)
    dialogue = Dialogue(chat_path, trust_remote_code=False, max_observation_tokens=100).chat
    tokens = np.array(dialogue.begin(MESSAGES, ()), dtype=np.int32)
    left = deque(Lease(n, 0, Prompt(n, tokens, "12", "test", chat=MESSAGES)) for n in range(GROUPS))

    def answer(version: int, wanted: int) -> Any:
        return lease_reply([left.popleft() for _ in range(min(wanted, len(left)))], False, "")

    endpoints = Endpoints("run", "ipc://none", "ipc://none", "ipc://none")
    pool = EnvironmentPool(config, window_tokens=engine.window_tokens, endpoints=endpoints)
    loop, client, _ = make_loop(recording, chat_path, answer, environments=pool, index=0, **options)
    try:
        finish(loop, client, GROUPS, lambda: time.sleep(0.001), ticks=60_000)
    finally:
        pool.close()
    return sorted(client.groups, key=lambda group: group.ticket), recording


@pytest.fixture(scope="module")
def played(
    chat_path: str, chat_engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Group], Recording]:
    """The groups of the environment."""
    folder = tmp_path_factory.mktemp("environment")
    (folder / "echo.py").write_text(ENVIRONMENT)
    with chdir(folder):
        return run(chat_path, chat_engine, "echo.py:Echo")


def test_an_agent_program_is_trained_on_the_arrays_of_the_environment_with_its_task(
    chat_path: str,
    chat_engine: Engine,
    played: tuple[list[Group], Recording],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    native, recorded = played
    by_agent, _ = run(chat_path, chat_engine, "agent:agent.py:run")
    policy = Qwen2ForCausalLM.from_pretrained(chat_path, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = load_tokenizer(chat_path)
    turns = drifted = ended = 0
    for group, other in zip(native, by_agent, strict=True):
        assert [row.member for row in group.trajectories] == [row.member for row in other.trajectories] == [0, 1]
        for member, same in zip(group.trajectories, other.trajectories, strict=True):
            for name in ("tokens", "action_mask", "behavior_logprobs", "versions"):
                assert np.array_equal(getattr(member, name), getattr(same, name)), name
            assert (member.reward, member.status) == (same.reward, same.status)
            key = f"{group.ticket}.0.{member.member}"
            assert len(recorded.prompts[key]) == len(recorded.sampled[key]) == TURNS
            for prompt, completion in zip(recorded.prompts[key], recorded.sampled[key], strict=True):
                assert member.tokens[: len(prompt)].tolist() == prompt
                own = slice(len(prompt), len(prompt) + len(completion.tokens))
                assert member.tokens[own].tolist() == completion.tokens and member.action_mask[own].all()
                again = tokenizer.encode(tokenizer.decode(completion.tokens), add_special_tokens=False)
                turns, drifted = turns + 1, drifted + (again != completion.tokens)
                ended += completion.status == "completed"
            expected = hf_logprobs(policy, member.tokens)[member.action_mask[1:]]
            assert np.abs(member.behavior_logprobs[member.action_mask] - expected).max() <= 1e-5
    assert turns == GROUPS * 2 * TURNS and 0 < ended < turns
    assert drifted > 0.01 * turns, "the tokenizer must be one that encodes texts in another way than they were sampled"


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
    dialogue = Dialogue(thinking_path, trust_remote_code=False, max_observation_tokens=100).chat
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
