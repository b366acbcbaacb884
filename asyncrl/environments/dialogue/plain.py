"""Dialogues without a template: an observation is its text, and a turn ends with a stop token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.environments.dialogue.formats import Read
from asyncrl.environments.environment import Message, Schema, ToolCall
from asyncrl.errors import AsyncrlError
from asyncrl.util.tokenizer import Decoder, load_decoder, load_tokenizer, no_embedding, num_embeddings

MARK = "\n[...]\n"
"""Stands for the middle of an observation that is too long."""
CHARACTERS_PER_TOKEN = 32
"""Text beyond this many characters per allowed token is cut before it is encoded, which takes time."""


class DialogueError(AsyncrlError, ValueError):
    """Messages that cannot become tokens."""


class Coders(NamedTuple):
    """A model's tokenizer."""

    decode: Decoder
    encode: Callable[[str], list[int]]
    """The tokens of a text, in which special tokens are text."""


class TextDialogue:
    """Encodes observations and decodes turns with the model's tokenizer, without a template.

    The text of a special token in an observation stays text: an environment cannot say a special token.
    """

    is_chat = False
    """True if prompts are messages."""

    @property
    def template_options(self) -> Mapping[str, Any]:
        """The variables of the chat template."""
        return {}

    def __init__(
        self,
        tokenizer_path: str,
        *,
        trust_remote_code: bool,
        max_observation_tokens: int,
        coders: Coders | None = None,
    ) -> None:
        """`coders` are those of the tokenizer if they are loaded already."""
        self.coders = coders or Coders(
            load_decoder(tokenizer_path, trust_remote_code=trust_remote_code),
            _load_encoder(tokenizer_path, trust_remote_code=trust_remote_code),
        )
        self._max_tokens = max_observation_tokens

    def begin(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """The tokens up to the policy's first turn. Without a template those of the contents; tools are not shown."""
        return [token for message in messages for token in self.encode(message["content"])]

    def follow(
        self, said: Sequence[Message], tools: Sequence[Schema], *, closed: bool, calls: Sequence[ToolCall] = ()
    ) -> list[int]:
        """The tokens between a turn and the next one. `closed` is true if the turn ended with a token that ends turns,
        `calls` are its calls. Raises DialogueError for messages that cannot be appended."""
        return self.begin(said, tools)

    def closes(self, tokens: Sequence[int]) -> bool:
        """True if the turn ended with a token that ends turns."""
        return True

    def parse(self, tokens: Sequence[int], tools: Sequence[Schema]) -> Message:
        """The turn as a message."""
        return self.read(tokens, tools).message

    def read(self, tokens: Sequence[int], tools: Sequence[Schema], *, first_call: int = 0) -> Read:
        """The turn as a message, with its calls, which are numbered from `first_call`. Without a template it has
        none."""
        return Read({"role": "assistant", "content": self.text_of(tokens)}, (), ())

    def encode(self, text: str) -> list[int]:
        """The tokens of an observation; of one that is too long, those of its two ends with MARK between them."""
        limit, ends = self._max_tokens, self._max_tokens * CHARACTERS_PER_TOKEN
        if len(text) > 2 * ends:
            return self._cut(self.coders.encode(text[:ends]), self.coders.encode(text[-ends:]))
        tokens = self.coders.encode(text)
        return tokens if len(tokens) <= limit else self._cut(tokens, tokens)

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of a turn, without special tokens."""
        return self.coders.decode([tokens])[0]

    def _cut(self, first: list[int], last: list[int]) -> list[int]:
        mark = self.coders.encode(MARK)[: self._max_tokens]
        room = self._max_tokens - len(mark)
        return [*first[: room - room // 2], *mark, *last[len(last) - room // 2 :]]


def check_embedded(tokens: Sequence[int], rows: int | None) -> None:
    """Raises DialogueError for a token above the `rows` of the model's embedding."""
    if rows is not None and tokens and max(tokens) >= rows:
        raise DialogueError(f"what the policy is to read {no_embedding(max(tokens), rows)}")


def _load_encoder(path: str, *, trust_remote_code: bool) -> Callable[[str], list[int]]:
    rows = num_embeddings(path)

    def checked(tokens: list[int]) -> list[int]:
        check_embedded(tokens, rows)
        return tokens

    file = Path(path) / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(file))
        fast.encode_special_tokens = True
        return lambda text: checked(fast.encode(text, add_special_tokens=False).ids)
    slow = load_tokenizer(path, trust_remote_code=trust_remote_code)
    return lambda text: checked(slow.encode(text, add_special_tokens=False, split_special_tokens=True))
