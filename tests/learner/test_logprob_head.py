"""The head against log-softmax over all logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from worlds import make_config, make_groups, pack_groups

from asyncrl.learner.model import logprob_head
from asyncrl.learner.model.loading import hidden_states, load_policy_model
from asyncrl.learner.model.logprob_head import LogprobHead
from asyncrl.learner.model.policy import PolicyNetwork

TOKENS, HIDDEN, VOCABULARY, TEMPERATURE = 23, 6, 50, 0.7


def inputs(bias: bool) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    output = nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    return output, torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randint(VOCABULARY, (TOKENS,))


def gradients(logprobs: Tensor, *leaves: Tensor, also: Tensor | float = 0.0) -> tuple[Tensor, ...]:
    return torch.autograd.grad((logprobs * torch.linspace(-1, 2, TOKENS)).sum() + also, leaves)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 7, TOKENS])
def test_values_and_gradients_are_those_of_all_logits(
    chunk_tokens: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprob_head, "CHUNK_BYTES", 4 * VOCABULARY * chunk_tokens)
    output, hidden, targets = inputs(bias)
    logprobs, entropies = LogprobHead(output, TEMPERATURE)(hidden, targets)
    assert not entropies.requires_grad
    scores = torch.log_softmax(output(hidden) / TEMPERATURE, dim=-1)
    plain = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logprobs, plain)
    torch.testing.assert_close(entropies, -(scores.exp() * scores).sum(dim=-1))
    leaves = (hidden, *output.parameters())
    for one, other in zip(gradients(logprobs, *leaves), gradients(plain, *leaves), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 7, TOKENS])
def test_gradients_of_logprobs_and_entropies_are_those_of_all_logits(
    chunk_tokens: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprob_head, "CHUNK_BYTES", 4 * VOCABULARY * chunk_tokens)
    output, hidden, targets = inputs(bias)
    logprobs, entropies = LogprobHead(output, TEMPERATURE, entropy_gradient=True)(hidden, targets)
    exact_output, exact_hidden = nn.Linear(HIDDEN, VOCABULARY, bias=bias).double(), hidden.detach().double()
    exact_output.load_state_dict(output.state_dict())
    scores = torch.log_softmax(exact_output(exact_hidden.requires_grad_()) / TEMPERATURE, dim=-1)
    plain, plain_entropies = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(scores.exp() * scores).sum(dim=-1)
    torch.testing.assert_close(entropies, plain_entropies.float())
    weights = torch.linspace(2, -1, TOKENS)
    of_all = gradients(logprobs, hidden, *output.parameters(), also=weights @ entropies)
    exactly = gradients(plain, exact_hidden, *exact_output.parameters(), also=weights.double() @ plain_entropies)
    for gradient, expected in zip(of_all, exactly, strict=True):
        torch.testing.assert_close(gradient, expected.float(), atol=2e-6, rtol=1e-5)


def test_gradients_in_bfloat16_do_not_depend_on_the_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    tokens, hidden_size = 2048, 16
    exact = nn.Linear(hidden_size, VOCABULARY)
    rounded = nn.Linear(hidden_size, VOCABULARY, dtype=torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    exact.load_state_dict(rounded.state_dict())
    hidden = torch.randn(tokens, hidden_size, dtype=torch.bfloat16)
    targets, slopes = torch.randint(VOCABULARY, (tokens,)), torch.rand(tokens)

    def of_parameters(output: nn.Linear, chunk_tokens: int) -> list[Tensor]:
        monkeypatch.setattr(logprob_head, "CHUNK_BYTES", 4 * VOCABULARY * chunk_tokens)
        logprobs, _ = LogprobHead(output, TEMPERATURE)(hidden.to(output.weight.dtype), targets)
        return [g.float() for g in torch.autograd.grad((logprobs * slopes).sum(), list(output.parameters()))]

    exactly = of_parameters(exact, tokens)
    for chunk_tokens in (tokens, 16):
        for gradient, expected in zip(of_parameters(rounded, chunk_tokens), exactly, strict=True):
            assert (gradient - expected).norm() < 0.004 * expected.norm(), chunk_tokens


@torch.no_grad()
def test_logprobs_of_a_bfloat16_model_are_those_of_float64_logits_of_its_states(tiny_model: Path) -> None:
    config = make_config(tiny_model, model={"dtype": "bfloat16"})
    model = load_policy_model(config, str(tiny_model))
    micro = pack_groups(config, make_groups(3)).micro_batches[0]
    states, _ = hidden_states(model, micro)
    output = model.get_output_embeddings()
    assert isinstance(output, nn.Linear) and states.dtype == output.weight.dtype == torch.bfloat16
    logprobs, _ = PolicyNetwork(config, model)(micro)
    logits = states.double() @ output.weight.double().t() / TEMPERATURE
    expected = logits.log_softmax(dim=-1).gather(-1, micro.targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0.0)
