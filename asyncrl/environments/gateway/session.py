"""The conversations of one episode: which of them a request continues, and the policy's turns in them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.environments.dialogue.conversation import ConversationRenderer, Spoken, note_refusal, num_common
from asyncrl.environments.dialogue.dialogue import Dialogue, is_appendable
from asyncrl.environments.dialogue.rendering import DialogueError
from asyncrl.environments.environment import Message, ToolCall
from asyncrl.environments.episode import Limits, PolicyTurn
from asyncrl.environments.gateway.openai_api import GatewayError, TurnAnswer, TurnRequest, is_echo, normalized
from asyncrl.wire.service_messages import NextTurn


@dataclass(slots=True)
class _End:
    """The end of a turn in a conversation."""

    number: int
    """Number of the turn in the episode."""
    num_messages: int
    num_tokens: int
    closed: bool
    """True if the turn ended with a token that ends turns."""
    calls: tuple[ToolCall, ...]
    spoken: Spoken | None
    """The turn, if conversations are rendered."""


@dataclass(slots=True)
class _Conversation:
    """The messages and the tokens of one branch, up to its last turn."""

    number: int
    tools: str
    messages: tuple[Message, ...] = ()
    tokens: list[int] = field(default_factory=list[int])
    ends: list[_End] = field(default_factory=list[_End])
    num_opening: int | None = None
    """Messages before the first turn; None if there was none."""
    busy: bool = False
    """True while a turn is sampled."""

    def common_turns(self, messages: Sequence[Message]) -> int:
        """Number of its turns that the messages begin with."""
        equal = 0
        for turn, message in zip(self.messages, messages, strict=False):
            if not is_echo(message, turn):
                break
            equal += 1
        return sum(end.num_messages <= equal for end in self.ends)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A turn that is being sampled."""

    request: TurnRequest
    conversation: _Conversation
    number: int
    answer: asyncio.Future[TurnAnswer]


class Session:
    """The conversations of one episode.

    A request whose messages continue the policy's part of a conversation continues its branch; a request that begins
    like an earlier part of it makes a branch from there, and any other a separate branch. The policy's text is
    recognised, never rendered: its tokens stay those that were sampled. Where conversations are rendered before each
    turn, one that does not continue the branch also makes a new one.
    """

    def __init__(
        self, episode: str, dialogue: Dialogue, limits: Limits, say: Callable[[NextTurn, list[int]], None]
    ) -> None:
        self.episode = episode
        self._dialogue, self._limits, self._say = dialogue, limits, say
        self._renderer = ConversationRenderer.of(dialogue)
        self._conversations: list[_Conversation] = []
        self._pending: dict[int, _Pending] = {}
        """By branch."""
        self._asked: dict[str, asyncio.Future[TurnAnswer]] = {}
        """The last request of each digest."""
        self._read: set[int] = set()
        self._num_calls = 0
        self._over = False
        self.num_turns = 0
        """Turns that were asked for."""
        self.was_cut = False
        """True if the last turn was cut at the token limit."""
        self.refused: GatewayError | None = None
        """Why the last request was not served, if it was for the window or the number of turns."""
        self.sampling_s = 0.0
        """Time in which at least one turn was sampled."""
        self._since_s = 0.0
        self.posted: Any = None
        """The reward that the program posted."""

    @property
    def template_options(self) -> Mapping[str, Any]:
        """The variables of the chat template for this episode."""
        return self._dialogue.template_options

    async def complete(self, request: TurnRequest) -> TurnAnswer:
        """Returns the policy's turn. Raises GatewayError."""
        if self._over:
            raise self._over_error()
        if request.is_retry and request.digest in self._asked:
            return await asyncio.shield(self._asked[request.digest])
        answer = self._asked[request.digest] = self._ask(request)
        return await asyncio.shield(answer)  # it outlives a client that does not wait

    def receive(self, branch: int, turn: PolicyTurn) -> None:
        """Receives a turn."""
        if (pending := self._pending.pop(branch, None)) is None:
            return
        if not self._pending:
            self.sampling_s += time.monotonic() - self._since_s
        request, conversation = pending.request, pending.conversation
        read = self._dialogue.read(turn.tokens, request.tools, first_call=self._num_calls)
        self._num_calls += len(read.calls)
        prompt = tuple(conversation.tokens)
        conversation.tokens += turn.tokens
        conversation.messages = (*request.messages, normalized(read.message))
        if conversation.num_opening is None:
            conversation.num_opening = len(request.messages)
        closed = self._dialogue.closes(turn.tokens)
        num_messages, num_tokens = len(conversation.messages), len(conversation.tokens)
        spoken = None if self._renderer is None else self._renderer.spoken(turn.tokens)
        conversation.ends.append(_End(pending.number, num_messages, num_tokens, closed, read.calls, spoken))
        conversation.busy = False
        self.was_cut = turn.status == "truncated"
        if not pending.answer.cancelled():
            answer = TurnAnswer(pending.number, read.message, prompt, tuple(turn.tokens), truncated=self.was_cut)
            pending.answer.set_result(answer)

    def delivered(self, answer: TurnAnswer) -> None:
        """Notes that the client has the answer."""
        self._read.add(answer.number)

    @property
    def messages(self) -> list[Message]:
        """The conversation of the last turn that was read, from the first turn of the policy on."""
        ends = [(end, branch) for branch in self._conversations for end in branch.ends if end.number in self._read]
        if not ends:
            return []
        end, conversation = max(ends, key=lambda pair: pair[0].number)
        return list(conversation.messages[conversation.num_opening : end.num_messages])

    def close(self) -> list[int]:
        """Ends the session. Returns the turns that nobody has read, each the last of its branch."""
        self._over = True
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(self._over_error())
                pending.answer.exception()  # nobody may wait for it
        lasts = [conversation.ends[-1].number for conversation in self._conversations if conversation.ends]
        return sorted({number for number in lasts if number not in self._read})

    def _over_error(self) -> GatewayError:
        return GatewayError(f"episode {self.episode} is over", status=410, code="episode_over")

    def _ask(self, request: TurnRequest) -> asyncio.Future[TurnAnswer]:
        """Asks the policy for a turn."""
        limits = self._limits
        if self.num_turns >= limits.max_turns:
            text = f"episode {self.episode} has had environment.max_turns = {limits.max_turns}"
            self.refused = GatewayError(text, code="max_turns")
            raise self.refused
        source, keep, tokens, conversation = self._place(request)
        room = limits.window_tokens - keep - len(tokens)
        if room < 1:
            self.refused = GatewayError(  # clients know the code and the words
                f"This model's maximum context length is {limits.window_tokens} tokens, the messages have "
                f"{keep + len(tokens)} tokens. Please reduce the length of the messages.",
                code="context_length_exceeded",
            )
            raise self.refused
        if not keep and not tokens:
            raise GatewayError("the prompt is empty")
        self.refused = None
        if conversation.number == len(self._conversations):
            self._conversations.append(conversation)
        conversation.tokens += tokens
        conversation.busy = True
        number, self.num_turns = self.num_turns, self.num_turns + 1
        answer: asyncio.Future[TurnAnswer] = asyncio.get_running_loop().create_future()
        if not self._pending:
            self._since_s = time.monotonic()
        self._pending[conversation.number] = _Pending(request, conversation, number, answer)
        max_tokens = min(room, limits.max_new_tokens, request.max_tokens or room)
        wish = NextTurn(self.episode, conversation.number, source, keep, max_tokens, list(request.stop))
        self._say(wish, tokens)
        return answer

    def _place(self, request: TurnRequest) -> tuple[int, int, list[int], _Conversation]:
        """Returns the branch that the request continues, the number of its tokens that stay, the tokens that follow,
        and the conversation, which is a new one unless it continues the complete branch."""
        tools = json.dumps(request.tools, sort_keys=True)
        new = _Conversation(len(self._conversations), tools)
        known = [branch for branch in self._conversations if branch.tools == tools]
        common = [branch.common_turns(request.messages) for branch in known]
        if not any(common):
            return 0, 0, self._begin(request), new
        best = max(range(len(known)), key=lambda number: (common[number], not known[number].busy))
        conversation, turns = known[best], common[best]
        if self._renderer is not None:
            try:
                return self._rendered(self._renderer, request, conversation, turns, new)
            except DialogueError as error:
                note_refusal(str(error.__cause__ or error))
        end = conversation.ends[turns - 1]
        said = request.messages[end.num_messages :]
        if not is_appendable(said):
            return 0, 0, self._begin(request), new
        tokens = _encoded(self._dialogue.follow, said, request.tools, closed=end.closed, calls=end.calls)
        if turns == len(conversation.ends) and not conversation.busy:
            return conversation.number, end.num_tokens, tokens, conversation
        new.messages, new.tokens = conversation.messages[: end.num_messages], conversation.tokens[: end.num_tokens]
        new.num_opening = conversation.num_opening
        return conversation.number, end.num_tokens, tokens, new

    def _rendered(
        self,
        renderer: ConversationRenderer,
        request: TurnRequest,
        conversation: _Conversation,
        turns: int,
        new: _Conversation,
    ) -> tuple[int, int, list[int], _Conversation]:
        """The same, if the prompt is the rendering of all messages, which begin with this many turns of the
        conversation. Raises DialogueError if the template refuses them."""
        messages = list(request.messages)
        ends, first = conversation.ends[:turns], conversation.ends[0].num_messages
        messages[first:] = [
            message if message["role"] == "assistant" else renderer.shortened(message) for message in messages[first:]
        ]
        spoken = {end.num_messages - 1: end.spoken for end in ends if end.spoken is not None}
        tokens = renderer.prompt(messages, request.tools, spoken)
        keep = num_common(conversation.tokens, tokens)
        if keep == len(conversation.tokens) and turns == len(conversation.ends) and not conversation.busy:
            return conversation.number, keep, tokens[keep:], conversation
        keep = min(keep, len(tokens) - 1)
        new.messages, new.tokens, new.ends = conversation.messages[: ends[-1].num_messages], tokens[:keep], ends
        return conversation.number, keep, tokens[keep:], new

    def _begin(self, request: TurnRequest) -> list[int]:
        return _encoded(self._dialogue.begin, request.messages, request.tools)


def _encoded(render: Callable[..., list[int]], *arguments: Any, **options: Any) -> list[int]:
    """The tokens of messages. Raises GatewayError if the chat template refuses them."""
    try:
        return render(*arguments, **options)
    except DialogueError as error:
        raise GatewayError(str(error)) from None
