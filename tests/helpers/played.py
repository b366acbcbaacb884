"""Episodes of an environment with given turns of the policy, and tiny models that have learned such turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.environments.dialogue.dialogue import Dialogue
from asyncrl.environments.environment import Message
from asyncrl.environments.player import Limits, Player, PolicyTurn, play_alone
from asyncrl.environments.table import Named
from asyncrl.types import Prompt
from asyncrl.wire.service_messages import EpisodeEnded, EpisodeStart, NextTurn
from tests.helpers.chat_models import save_chat_model

FIT_STEPS = 150
LIMITS = Limits(4000, 500, 5, 60.0, 50.0)
ASK: list[Message] = [{"role": "user", "content": "Go."}]


def play_row(
    named: Named,
    dialogue: Dialogue,
    say: Callable[[Player, NextTurn, list[int]], None],
    *,
    tokens: Sequence[int],
    limits: Limits = LIMITS,
    stuck: set[Any] | None = None,
    **row: Any,
) -> EpisodeEnded:
    """Plays an episode of the environment; `row` are fields of its prompt."""
    threads = ThreadPoolExecutor(4)
    fields = {"row": 7, "ground_truth": "408", "data_source": "test"} | row
    start = EpisodeStart("0.0.0", Prompt(tokens=np.array(tokens, np.int32), **fields), seed=5)
    ended = play_alone(Player(start, named, dialogue, limits, threads, say, stuck=set() if stuck is None else stuck))
    threads.shutdown(wait=False, cancel_futures=True)
    return ended


class Played:
    """An episode, with what the policy read before each of its turns."""

    def __init__(self, dialogue: Dialogue, named: Named, said: Sequence[str], start: dict[str, Any]) -> None:
        self.read: list[str] = []
        self.tokens: list[int] = []
        """The complete sequence."""
        self.said: list[bool] = []
        """Which of its tokens are the policy's."""
        self._dialogue, self._turns = dialogue, iter(said)
        given = {"ground_truth": "7", "chat": ASK} | start
        chat = given["chat"]
        tokens = dialogue.encode("Go.") if chat is None else dialogue.chat.begin(chat, [])
        self.tokens, self.said = tokens, [False] * len(tokens)
        self.ended = play_row(named, dialogue, self._say, tokens=tokens, **given)

    def _say(self, player: Player, wish: NextTurn, observation: list[int]) -> None:
        chat = self._dialogue.chat
        self.read.append(chat.decode(observation))
        turn = PolicyTurn([*chat.rendering.encode(next(self._turns)), chat.ends.last], "completed")
        self.tokens = [*self.tokens[: wish.keep], *observation, *turn.tokens]
        self.said = [*self.said[: wish.keep], *[False] * len(observation), *[True] * len(turn.tokens)]
        player.receive(wish.branch, turn)


def call(name: str, **arguments: Any) -> str:
    """The text of a call."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def save_chat_policy(folder: Path, named: Named, scripts: Sequence[Sequence[str]], **start: Any) -> None:
    """Writes a tiny model that has learned the turns of the scripts in the environment, each as likely as the
    others."""
    save_chat_model(folder)
    dialogue = Dialogue(str(folder), trust_remote_code=False, max_observation_tokens=200)
    played = [Played(dialogue, named, script, start) for script in scripts]
    for episode in played:
        assert episode.ended.error == "", episode.ended.error
    ends = dialogue.chat.ends.last
    _fit([(episode.tokens, episode.said) for episode in played], ends).save_pretrained(folder)


def _fit(episodes: Sequence[tuple[list[int], list[bool]]], end: int) -> Any:
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.utils.rnn import pad_sequence
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=448,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=end,
        )
    )
    tokens = pad_sequence([torch.tensor(tokens) for tokens, _ in episodes], batch_first=True, padding_value=end)
    said = pad_sequence([torch.tensor(said) for _, said in episodes], batch_first=True)
    labels = tokens.masked_fill(~said, -100)[:, 1:].flatten()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98))
    for _ in range(FIT_STEPS):
        loss = cross_entropy(model(input_ids=tokens[:, :-1]).logits.flatten(0, 1), labels, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model
