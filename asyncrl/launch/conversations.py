"""What was said and heard in the episodes of a run, for people: the turns of the policy apart from what it read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError, DataError
from asyncrl.samples import Samples
from asyncrl.samples.table import Part
from asyncrl.util.tokenizer import Decoder

if TYPE_CHECKING:
    from asyncrl.environments.dialogue.conversation import Display

CONVERSATION = "conversation"
"""The column of samples with the lines of a trajectory; null where its turns are not known."""
_COLUMN = pa.list_(
    pa.struct([("role", pa.string()), ("text", pa.string()), ("said", pa.bool_()), ("version", pa.int32()),
               ("reward", pa.float64())])
)  # fmt: skip


class Line(NamedTuple):
    """A message of a conversation, or a part of one."""

    role: str
    """That of the message; "reasoning" and "calls" for these parts of the policy's. In plain text "prompt", "policy"
    and "environment"."""
    text: str
    said: bool
    """True for what the policy said."""
    version: int | None = None
    """The newest version that sampled a token of it, where that is known."""
    reward: float | None = None
    """That of the turn, on its last line, if the environment rewarded turns of the trajectory."""


class Conversations:
    """Shows trajectories of episodes."""

    def __init__(self, decode: Callable[[Sequence[int]], str], display: Display | None) -> None:
        """`display` is that of the model's chat template; without one, conversations are plain text."""
        self._decode, self._display = decode, display

    @classmethod
    def of(cls, config: Config, folder: str, decoder: Decoder, *, special_tokens: bool = False) -> Conversations | None:
        """Those of a run with its tokenizer in a folder, with `special_tokens` as plain text with these. None without
        an environment."""
        if config.environment.name is None:
            return None
        from asyncrl.environments.dialogue.conversation import Display
        from asyncrl.environments.dialogue.dialogue import Dialogue
        from asyncrl.environments.dialogue.rendering import DialogueError

        def decode(tokens: Sequence[int]) -> str:
            return decoder([tokens], special_tokens=special_tokens)[0]

        if special_tokens:
            return cls(decode, None)
        try:
            return cls(decode, Display(Dialogue.of(config, folder=folder).chat))
        except (ConfigError, DialogueError):  # the model has no chat template
            return cls(decode, None)

    def lines(self, samples: Samples, row: int) -> list[Line]:
        """The lines of a trajectory. Raises DataError if its turns are not known."""
        parts = samples.turns(row)
        prompt = samples["tokens"][row][: int(samples["num_prompt_tokens"][row])].tolist()
        display = self._display if self._display is not None and self._display.is_chat(prompt) else None
        has_rewards = any(part.reward for part in parts)
        lines = [Line(role or "prompt", text, said=False) for role, text in self._heard(prompt, display, "prompt")]
        for part in parts:
            if not part.said:
                lines += [
                    Line(role, text, said=False) for role, text in self._heard(part.tokens, display, "environment")
                ]
                continue
            said = self._said(part, display)
            lines += [Line(role, text, said=True, version=part.version) for role, text in said]
            lines[-1] = lines[-1]._replace(reward=part.reward if has_rewards else None)
        return lines

    def add_to(self, samples: Samples) -> Samples:
        """The samples with the column CONVERSATION."""
        return samples.with_column(
            CONVERSATION, pa.array([self._row(samples, row) for row in range(len(samples))], _COLUMN)
        )

    def _row(self, samples: Samples, row: int) -> list[dict[str, Any]] | None:
        try:
            return [line._asdict() for line in self.lines(samples, row)]
        except DataError:  # it was recorded without its turns
            return None

    def _heard(self, tokens: Sequence[int], display: Display | None, role: str) -> list[tuple[str, str]]:
        return [(role, self._decode(tokens))] if display is None else list(display.heard(tokens))

    def _said(self, part: Part, display: Display | None) -> list[tuple[str, str]]:
        return [("policy", self._decode(part.tokens))] if display is None else list(display.said(part.tokens))


def in_one_line(lines: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The prompt, and what followed it with what the policy heard in brackets: `?1*2 [>2] 2`."""
    first = next((number for number, line in enumerate(lines) if line["said"]), len(lines))
    rest = [line["text"] if line["said"] else f"[{line['text']}]" for line in lines[first:]]
    return "\n".join(line["text"] for line in lines[:first]), " ".join(rest)
