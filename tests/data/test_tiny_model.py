"""The demo's model loads, learns in its warm start, and is the same for a seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.data.tiny_model import make_model, make_tiny_model, make_tokenizer, warm_start


def test_folder_loads_and_is_the_same_for_a_seed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_tiny_model(tmp_path / name, steps=2)
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "two"))
    for (name, mine), (_, theirs) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert tokenizer.decode(tokenizer.encode("12+07=")) == "12+07="
    assert len(tokenizer.encode("12+07=")) == 6
    assert one.config.eos_token_id == tokenizer.eos_token_id == tokenizer.encode("<eos>")[0]
    assert one.config.vocab_size >= len(tokenizer)


def test_no_steps_leave_the_model_untrained(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", steps=0)
    torch.manual_seed(0)
    untrained = make_model().state_dict()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in untrained.items())


@pytest.mark.slow
def test_warm_start_moves_towards_the_share_it_shows() -> None:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = make_model()
    before = warm_start(model, tokenizer, steps=0, seed=0)
    after = warm_start(model, tokenizer, steps=40, seed=0)
    assert before < 0.001
    assert 0.01 < after < 0.4
