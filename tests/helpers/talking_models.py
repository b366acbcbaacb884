"""A tiny model with a chat template that writes one of some texts, whatever it reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.environments.dialogue.dialogue import Dialogue
from tests.helpers.chat_models import save_chat_model

WINDOW_TOKENS = 1024
STEPS, BATCH, CONTEXT_TOKENS = 150, 16, 160


def save_talking_model(folder: Path, texts: Sequence[str], *, template: str | None = None) -> None:
    """Writes the model. It is trained on the texts behind random tokens and the generation prompt."""
    save_chat_model(folder, template=template)
    dialogue = Dialogue(str(folder), trust_remote_code=False, max_observation_tokens=1000).chat
    said = [[*dialogue.rendering.encode(text), dialogue.ends.last] for text in texts]
    before = dialogue.rendering.encode(dialogue.rendering.render([{"role": "user", "content": "x"}], (), generate=True))
    prompt = before[before.index(dialogue.ends.last) + 1 :]
    torch.manual_seed(0)
    size = max(dialogue.rendering.special_tokens.values()) + 32
    config = Qwen2Config(
        vocab_size=size + (-size) % 32, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=WINDOW_TOKENS, tie_word_embeddings=True,
        eos_token_id=dialogue.ends.last, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    longest = max(map(len, said))
    for _ in range(STEPS):
        start = int(torch.randint(2, CONTEXT_TOKENS, ()))
        tokens = torch.randint(0, 400, (BATCH, start + len(prompt) + longest))
        labels = torch.full_like(tokens, -100)
        tokens[:, start : start + len(prompt)] = torch.tensor(prompt)
        for row, choice in enumerate(torch.randint(len(said), (BATCH,)).tolist()):
            place = slice(start + len(prompt), start + len(prompt) + len(said[choice]))
            tokens[row, place] = labels[row, place] = torch.tensor(said[choice])
        loss = cross_entropy(model(input_ids=tokens[:, :-1]).logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
