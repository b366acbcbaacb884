"""The dialogue of a run, which has rows with and without messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from asyncrl.config.config import Config
from asyncrl.environments.dialogue.chat import ChatDialogue
from asyncrl.environments.dialogue.plain import TextDialogue
from asyncrl.util.tokenizer import TEMPLATE_COLUMN

MAX_CHATS = 64
"""Maximum number of cached dialogues of rows with separate template options."""


class Dialogue(TextDialogue):
    """Plain text, and `chat` under the model's template, which is loaded when the first row needs it."""

    def __init__(
        self,
        tokenizer_path: str,
        *,
        trust_remote_code: bool,
        max_observation_tokens: int,
        tool_format: str = "auto",
        history: str = "keep",
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        """`tool_format` and `history` are those of the config's environment, `template_options` those of its data."""
        super().__init__(
            tokenizer_path, trust_remote_code=trust_remote_code, max_observation_tokens=max_observation_tokens
        )
        self._path, self._trust_remote_code = tokenizer_path, trust_remote_code
        self._tool_format, self._history, self._template_options = tool_format, history, template_options
        self._chats: dict[str, ChatDialogue] = {}

    @classmethod
    def of(cls, config: Config, *, folder: str | None = None) -> Dialogue:
        """The dialogue of a run, with the tokenizer in the folder, by default in `model.path`."""
        return cls(
            folder or config.model.path,
            trust_remote_code=config.model.trust_remote_code,
            max_observation_tokens=config.environment.max_observation_tokens,
            tool_format=config.environment.tool_format,
            history=config.environment.history,
            template_options=config.data.template_options,
        )

    @cached_property
    def chat(self) -> ChatDialogue:
        """The dialogue under the chat template. Raises ConfigError or DialogueError if it cannot be used."""
        return ChatDialogue(
            self._path,
            trust_remote_code=self._trust_remote_code,
            max_observation_tokens=self._max_tokens,
            tool_format=self._tool_format,
            history=self._history,
            template_options=self._template_options,
            coders=self.coders,
        )

    def chat_for(self, columns: Mapping[str, Any]) -> ChatDialogue:
        """The dialogue for a row with these columns, which may have options of the template. Raises as `chat` does."""
        options: dict[str, Any] = columns.get(TEMPLATE_COLUMN) or {}
        if not options:
            return self.chat
        key = json.dumps(options, sort_keys=True)
        if key not in self._chats:
            if len(self._chats) >= MAX_CHATS:
                self._chats.clear()
            self._chats[key] = self.chat.with_options(options)
        return self._chats[key]
