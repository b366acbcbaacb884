"""The head against log-softmax over all logits, and the end tokens that it excludes early in a completion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from worlds import make_config, make_groups, pack_groups

from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model import logprob_head
from asyncrl.learner.model.loading import hidden_states, load_policy_model
from asyncrl.learner.model.logprob_head import LogprobHead
from asyncrl.learner.model.policy import Excluded, Policy, PolicyNetwork, Reference
from asyncrl.types import Group
from asyncrl.util.model_files import end_tokens

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


ENDS = [3, 17]

MINIMUM = 3


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with end tokens in its generation config."""
    folder = tmp_path_factory.mktemp("ends") / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return folder


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk_tokens", [4, TOKENS])
def test_excluded_tokens_have_no_probability_and_no_gradient(
    chunk_tokens: int, entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprob_head, "CHUNK_BYTES", 4 * VOCABULARY * chunk_tokens)
    torch.manual_seed(0)
    output, hidden = nn.Linear(HIDDEN, VOCABULARY), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    targets, excludes = torch.arange(20, 20 + TOKENS), torch.arange(TOKENS) % 3 == 0
    head = LogprobHead(output, TEMPERATURE, entropy_gradient=entropy_gradient, excluded=ENDS)
    logits = output(hidden) / TEMPERATURE
    unlikely = torch.zeros_like(logits)
    unlikely[excludes.unsqueeze(-1) & torch.isin(torch.arange(VOCABULARY), torch.tensor(ENDS))] = -1e4
    scores = (logits + unlikely).log_softmax(dim=-1)
    plain = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(scores.exp() * scores).sum(dim=-1)
    found = head(hidden, targets, excludes)
    leaves = (hidden, *output.parameters())

    def gradients(outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        weights = torch.linspace(-1, 2, TOKENS)
        loss = weights @ outputs[0] + (weights.flip(0) @ outputs[1] if entropy_gradient else 0.0)
        return torch.autograd.grad(loss, leaves)

    for one, other in zip((*found, *gradients(found)), (*plain, *gradients(plain)), strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-4)


def test_the_end_tokens_are_those_of_tokenizer_and_generation_config(model: Path, tiny_model: Path) -> None:
    assert end_tokens(str(model)) == ENDS
    assert Excluded.of(make_config(model)) is None
    assert Excluded.of(make_config(model, generator={"min_new_tokens": MINIMUM})) == Excluded(MINIMUM, tuple(ENDS))
    assert Excluded.of(make_config(tiny_model, generator={"min_new_tokens": MINIMUM})) is None, "it has no end token"


def test_a_completion_is_a_run_of_positions() -> None:
    positions = torch.tensor([4, 5, 6, 7, 10, 11, 12, 13, 15])
    early = [1, 1, 0, 0, 1, 1, 0, 0, 1]
    assert Excluded(2, (1,)).is_early(positions).int().tolist() == early
    assert Excluded(2, (1,)).is_early(positions[:0]).tolist() == []


def without_early_ends(groups: list[Group]) -> list[Group]:
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        for end in ENDS:
            trajectory.tokens[trajectory.tokens == end] = end + 1
    return groups


def test_policy_and_reference_have_the_distribution_that_was_sampled(one_rank: Ranks, model: Path) -> None:
    config = make_config(model, generator={"min_new_tokens": MINIMUM, "temperature": TEMPERATURE, "max_new_tokens": 20})
    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float64)
    policy, reference = Policy(config, one_rank), Reference(config, one_rank)
    groups = without_early_ends(make_groups(3))
    by_name = {(group.ticket, n): t for group in groups for n, t in enumerate(group.trajectories)}
    changed = 0.0
    for micro in pack_groups(config, groups).micro_batches:
        found = policy.logprobs(micro)
        assert torch.equal(found, reference.logprobs(micro))
        for number, name in enumerate(micro.names):
            trajectory = by_name[name]
            ids = torch.from_numpy(trajectory.tokens).long()
            logits = plain(input_ids=ids.unsqueeze(0)).logits[0, :-1] / TEMPERATURE
            full = logits.log_softmax(dim=-1).gather(-1, ids[1:, None]).squeeze(-1)
            place = 0
            for position in range(1, len(ids)):
                place = place + 1 if trajectory.action_mask[position] else 0
                if 0 < place <= MINIMUM:
                    logits[position - 1, ENDS] = -torch.inf
            expected = logits.log_softmax(dim=-1).gather(-1, ids[1:, None]).squeeze(-1)
            mask = torch.from_numpy(trajectory.action_mask[1:])
            changed = max(changed, float((full - expected)[mask].detach().abs().max()))
            torch.testing.assert_close(found[micro.seq == number], expected[mask].float(), atol=2e-5, rtol=1e-5)
    assert changed > 0.01
