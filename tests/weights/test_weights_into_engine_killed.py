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
MOMENTS = {
    "learner 0": ["say:Offer", "say:Go", "sum:1", "sum:20", "say:Sent"],
    "learner 1": ["sum:1", "sum:15"],
    "generator 1": ["say:Ready", "sum:1", "sum:30", "say:Received", "commit"],
    "generator 2": ["sum:10"],
}
ALL = [(victim, moment) for victim, moments in MOMENTS.items() for moment in moments]
FAST = [("learner 0", "sum:20"), ("generator 1", "sum:30")]


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
    """Two learner ranks and two generators, of which a victim is killed at its moment."""

    def __init__(self, folder: Path, address: str, cleanup: list, victim: str, moment: str) -> None:
        self._folder, self._address, self._cleanup = folder, address, cleanup
        self._moments = {victim: moment}
        self.completions: list[dict[str, Any]] = []
        self.learners = self.start_learners()
        self.generators = [self.start_generator(rank) for rank in (1, 2)]

    def start_learners(self) -> list[Process]:
        return [self._start("learner", rank, "2") for rank in (0, 1)]

    def start_generator(self, rank: int) -> Process:
        return self._start("generator", rank)

    def _start(self, role: str, rank: int, *more: str) -> Process:
        moment = self._moments.pop(f"{role} {rank}", None)
        where = [self._address, self._folder, *([moment] if moment else [])]
        return Process(self._cleanup, "policy_process.py", role, rank, *more, *where)

    def send(self, version: int) -> None:
        for learner in self.learners:
            learner.say(f"send {version}")

    def await_version(self, generator: Process, version: int, timeout_s: float = 60.0) -> None:
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


@pytest.mark.parametrize(
    ("victim", "moment"), [pytest.param(*one, marks=[] if one in FAST else pytest.mark.slow) for one in ALL]
)
def test_no_token_is_sampled_between_two_versions(
    victim: str, moment: str, folder: Path, address: str, cleanup: list
) -> None:
    run = Run(folder, address, cleanup, victim, moment)
    run.send(0)
    for generator in run.generators:
        run.await_version(generator, 0)
    run.send(1)
    role, number = victim.split()
    ended = run.learners[int(number)] if role == "learner" else run.generators[int(number) - 1]
    ended.process.wait(60)
    if role == "learner":
        for learner in run.learners:
            learner.end()
        run.learners = run.start_learners()
        run.send(2)
    else:
        other = run.generators[2 - int(number)]
        run.await_version(other, 1)
        run.generators[int(number) - 1] = run.start_generator(int(number))
        run.send(2)
    for generator in run.generators:
        run.await_version(generator, 2)
    check(run.completions, folder)
