"""Learner ranks and generators that are killed while versions are loaded into the engines bucket by bucket: no token is
sampled between two versions, and the others continue."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policy_process import PROMPTS, policy
from transformers import Qwen2Config, Qwen2ForCausalLM
from weight_parts import Process

from tests.helpers.reward_pool import save_tokenizer

TOLERANCE, DIFFERENT = 1e-4, 1e-2
MOMENTS = [
    ("generator", 1, "sum:30"), ("learner", 0, "sum:20"), ("generator", 1, "commit"), ("generator", 2, "say:Ready"),
    ("learner", 1, "sum:15"), ("learner", 0, "say:Offer"), ("generator", 2, "say:Received"), ("learner", 0, "say:Sent"),
]  # fmt: skip
"""The processes that are killed, and when: in all phases of a round, on both sides."""
MOMENTS_IPC = [("generator", 1, "sum:12"), ("learner", 0, "sum:8")]
"""The same for one learner rank and one generator, whose memory they share."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=False,
        eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


class Run:
    """As many learner ranks as generators."""

    def __init__(self, folder: Path, address: str, cleanup: list, *, transport: str, count: int) -> None:
        self._folder, self._address, self._cleanup = folder, address, cleanup
        self._transport, self._count = transport, count
        self.completions: list[dict[str, Any]] = []
        self.learners = self.start_learners()
        self.generators = [self.start_generator(rank + 1) for rank in range(count)]

    def start_learners(self) -> list[Process]:
        return [self._start("learner", rank, str(self._count)) for rank in range(self._count)]

    def start_generator(self, rank: int) -> Process:
        return self._start("generator", rank)

    def _start(self, role: str, rank: int, *more: str) -> Process:
        where = self._address, self._folder, self._transport
        return Process(self._cleanup, "policy_process.py", role, rank, *more, *where)

    def send(self, version: int) -> None:
        for learner in self.learners:
            learner.say(f"send {version}")

    def await_version(self, generator: Process, version: int, timeout_s: float = 120.0) -> None:
        """Returns when the generator has completed something under the version; keeps all completions."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            one = generator.next(max(0.1, deadline_s - time.monotonic()))
            self.completions.append(one)
            if one["versions"][-1] == version:
                return


def check(completions: list[dict[str, Any]], folder: Path) -> None:
    """Checks that the log-prob of every token is that of the policy of its version, and of no other."""
    policies: dict[int, Any] = {}
    others: list[float] = []
    for one in completions:
        versions, prompt = np.array(one["versions"]), PROMPTS[one["prompt"]]
        for version in {*versions.tolist(), *(versions + 1).tolist()}:
            model = policies.setdefault(version, policy(str(folder), version))
            with torch.no_grad():
                logits = model(torch.tensor([prompt + one["tokens"]])).logits[0, len(prompt) - 1 : -1]
            own = logits.log_softmax(-1)[torch.arange(len(versions)), torch.tensor(one["tokens"])].numpy()
            difference = np.abs(own - np.array(one["logprobs"]))
            here = versions == version
            assert not here.any() or difference[here].max() < TOLERANCE, one
            others += difference[~here].tolist()
    assert np.median(others) > DIFFERENT, "versions differ"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("transport", "count", "moments"), [("gloo", 2, MOMENTS), ("ipc", 1, MOMENTS_IPC)])
def test_no_token_is_sampled_between_two_versions(
    transport: str, count: int, moments: list[tuple[str, int, str]], folder: Path, address: str, cleanup: list
) -> None:
    run = Run(folder, address, cleanup, transport=transport, count=count)
    version = 0
    run.send(version)
    for generator in run.generators:
        run.await_version(generator, version)
    for role, rank, moment in moments:
        victim = run.learners[rank] if role == "learner" else run.generators[rank - 1]
        victim.say(f"die {moment}")
        time.sleep(0.2)
        version += 1
        run.send(version)
        assert victim.process.wait(60) == -9, (role, rank, moment)
        if role == "learner":
            for learner in run.learners:
                learner.end()
            run.learners = run.start_learners()
        else:
            for other in run.generators:
                if other is not victim:
                    run.await_version(other, version)
            run.generators[rank - 1] = run.start_generator(rank)
        version += 1
        run.send(version)
        for generator in run.generators:
            run.await_version(generator, version)
    assert {one for found in run.completions for one in found["versions"]} >= set(range(0, version + 1, 2))
    check(run.completions, folder)
