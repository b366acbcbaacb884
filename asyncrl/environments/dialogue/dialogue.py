"""The dialogue of a run, which has rows with and without messages."""

from __future__ import annotations

from functools import cached_property

from asyncrl.config import Config
from asyncrl.environments.dialogue.chat import ChatDialogue
from asyncrl.environments.dialogue.plain import TextDialogue


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
    ) -> None:
        """`tool_format` and `history` are those of the config's environment."""
        super().__init__(
            tokenizer_path, trust_remote_code=trust_remote_code, max_observation_tokens=max_observation_tokens
        )
        self._path, self._trust_remote_code = tokenizer_path, trust_remote_code
        self._tool_format, self._history = tool_format, history

    @classmethod
    def of(cls, config: Config, *, folder: str | None = None) -> Dialogue:
        """The dialogue of a run, with the tokenizer in the folder, by default in `model.path`."""
        return cls(
            folder or config.model.path,
            trust_remote_code=config.model.trust_remote_code,
            max_observation_tokens=config.environment.max_observation_tokens,
            tool_format=config.environment.tool_format,
            history=config.environment.history,
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
            coders=self.coders,
        )
