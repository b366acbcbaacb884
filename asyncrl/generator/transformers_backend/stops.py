"""Finds the texts that end a completion."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config.config import Config
from asyncrl.util.model_files import load_decoder

MARGIN_TOKENS = 8
"""Tokens that are decoded in front of those that may be part of the text, so that it is not at the beginning."""


class StopTexts:
    """Decodes the end of completions, with special tokens, as rewards see them."""

    def __init__(self, config: Config) -> None:
        self._decode = load_decoder(config.model.path, trust_remote_code=config.model.trust_remote_code)

    def completed(self, tokens: Sequence[int], texts: Sequence[str]) -> bool:
        """True if the last of the tokens completes one of the texts."""
        longest = max(len(text.encode()) for text in texts)
        end = list(tokens[-longest - MARGIN_TOKENS :])
        before, after = self._decode([end[:-1], end], special_tokens=True)
        known = len(before.rstrip("\ufffd"))
        return any(after.find(text, max(0, known - len(text) + 1)) >= 0 for text in texts)
