"""The gateway with the client library of OpenAI: what is sampled is what the client reads, and what is trained."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
import pytest

from asyncrl.environments.episode import Limits
from asyncrl.environments.gateway.gateway import Gateway
from asyncrl.environments.gateway.openai_api import Access, GatewayError, chat_request
from asyncrl.environments.gateway.session import Session
from asyncrl.wire.service_messages import NextTurn
from tests.helpers.dialogues import Branches, CharacterDialogue, policy_turn, turn

WINDOW = 400
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "hello"}


@dataclass
class Policy(Branches):
    """Says the texts in turn."""

    texts: Iterator[str] = field(default_factory=lambda: iter(()))
    delay_s: float = 0.0
    session: Session = field(init=False)

    def say(self, wish: NextTurn, tokens: list[int]) -> None:
        said = policy_turn(next(self.texts))
        self.add(wish, tokens, said.tokens)
        asyncio.get_running_loop().call_later(self.delay_s, self.session.receive, wish.branch, said)


def play(
    agent: Callable[[openai.AsyncOpenAI, Access], Awaitable[Any]], *texts: str, delay_s: float = 0.0, turns: int = 8
) -> tuple[Any, Policy, list[int]]:
    """Returns the agent's result, the policy, and the turns that nobody has read."""

    async def run() -> tuple[Any, Policy, list[int]]:
        policy, dialogue = Policy(texts=iter(texts), delay_s=delay_s), CharacterDialogue()
        policy.session = Session("7.0.1", dialogue, Limits(WINDOW, 50, turns, 10.0, 10.0), policy.say)
        gateway = Gateway()
        await gateway.start()
        access = gateway.open(policy.session)
        try:
            async with openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
                result = await asyncio.wait_for(agent(client, access), 20.0)
        finally:
            gateway.end(policy.session)
            unused = policy.session.close()
            await gateway.close()
        return result, policy, unused

    return asyncio.run(run())


async def ask(client: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    response = await client.chat.completions.create(model="policy", messages=messages, **options)
    return response.choices[0]


def test_a_conversation_stays_one_branch_of_the_sampled_tokens() -> None:
    async def agent(client: openai.AsyncOpenAI, access: Access) -> Any:
        messages: list[Any] = [USER]
        first = await ask(client, messages, tools=[TOOL])
        assert first.finish_reason == "tool_calls" and first.message.tool_calls[0].function.arguments == '{"a": 1}'
        messages += [first.message, {"role": "tool", "tool_call_id": "call_1", "content": "3"}]
        second = await ask(client, messages, tools=[TOOL], temperature=0.0, seed=3)
        messages += [second.message.model_dump(), {"role": "user", "content": [{"type": "text", "text": "more"}]}]
        return await ask(client, messages, tools=[TOOL])

    last, policy, unused = play(agent, '!add {"a": 1}', " so 3 ", "bye~")
    assert (last.finish_reason, last.message.content, unused) == ("length", "bye", [])
    said = [(one["role"], one["content"]) for one in policy.session.messages]
    heard = ("tool", "3"), ("user", "more")
    assert said == [("assistant", ""), heard[0], ("assistant", " so 3 "), heard[1], ("assistant", "bye")]
    assert list(policy.branches) == [0] and policy.wishes[0].keep == 0
    for prompt in policy.prompts:
        assert policy.branches[0][: len(prompt)] == prompt
    said = [turn('!add {"a": 1}'), turn(" so 3 "), list(map(ord, "bye"))]
    assert sum(map(len, said)) + len(policy.prompts[-1]) - sum(map(len, said[:2])) == len(policy.branches[0])


def test_a_turn_that_was_cut_is_closed_in_the_context_and_max_tokens_are_lowered() -> None:
    async def agent(client: openai.AsyncOpenAI, access: Access) -> Any:
        first = await ask(client, [USER], max_tokens=7, stop=["."])
        return await ask(client, [USER, first.message, USER], max_completion_tokens=1000)

    _, policy, _ = play(agent, "cut~", "end")
    assert [wish.max_tokens for wish in policy.wishes] == [7, 50] and policy.wishes[0].stop == ["."]
    assert policy.prompts[1][len(policy.prompts[0]) :][:5] == [*map(ord, "cut"), 0, 2]


def test_rewritten_histories_and_siblings_are_branches_and_begin_with_context() -> None:
    async def agent(client: openai.AsyncOpenAI, access: Access) -> Any:
        first = await ask(client, [USER])
        history = [USER, first.message]
        await asyncio.gather(*(ask(client, [*history, {"role": "user", "content": text}]) for text in "ab"))
        await ask(client, [{"role": "user", "content": "summary"}])
        return await ask(client, [USER])

    _, policy, unused = play(agent, "one", "two", "three", "four", "five", delay_s=0.01)
    assert [(wish.branch, wish.source, wish.keep > 0) for wish in policy.wishes] == [
        (0, 0, False),
        (0, 0, True),
        (1, 0, True),
        (2, 0, False),
        (3, 0, False),
    ]
    first = policy.prompts[0] + turn("one")
    assert policy.branches[0][: len(first)] == first == policy.branches[1][: len(first)]
    assert unused == [] and [one["content"] for one in policy.session.messages] == ["five"]


def test_a_request_that_is_repeated_has_one_answer() -> None:
    async def agent(client: openai.AsyncOpenAI, access: Access) -> Any:
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.05, max_retries=0).chat.completions.create(
                model="policy", messages=[USER]
            )
        repeated = {"x-stainless-retry-count": "1"}
        first = await ask(client, [USER], extra_headers=repeated)
        again = await ask(client, [USER], extra_headers=repeated)
        key = {"idempotency-key": "k"}
        return first, again, await ask(client, [USER], extra_headers=key), await ask(client, [USER], extra_headers=key)

    answers, policy, unused = play(agent, "one", "two", delay_s=0.3)
    assert [answer.message.content for answer in answers] == ["one", "one", "two", "two"]
    assert len(policy.wishes) == 2 and unused == []


def test_a_turn_that_nobody_reads_is_reported() -> None:
    async def agent(client: openai.AsyncOpenAI, access: Access) -> Any:
        await ask(client, [USER])
        task = asyncio.ensure_future(ask(client, [{"role": "user", "content": "x"}]))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.sleep(0.5)

    _, policy, unused = play(agent, "one", "two", delay_s=0.3)
    assert len(policy.wishes) == 2 and unused == [1]
    assert [one["content"] for one in policy.session.messages] == ["one"]


def test_the_messages_of_a_branch_begin_with_the_first_turn() -> None:
    async def agent(client: openai.AsyncOpenAI, access: Access) -> Any:
        history = [USER, (await ask(client, [USER])).message]
        for text in "ab":
            await ask(client, [*history, {"role": "user", "content": text}])

    _, policy, _ = play(agent, "one", "two", "three")
    assert [one["content"] for one in policy.session.messages] == ["one", "b", "three"]


def test_streams_come_in_the_form_of_the_api() -> None:
    async def agent(client: openai.AsyncOpenAI, access: Access) -> Any:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}, "tools": [TOOL]}
        events = [e async for e in await client.chat.completions.create(model="m", messages=[USER], **options)]  # type: ignore[call-overload]
        return events

    events, _, unused = play(agent, '!add {"a": 1}')
    call = next(e.choices[0].delta.tool_calls for e in events if e.choices and e.choices[0].delta.tool_calls)[0]
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    assert events[-2].choices[0].finish_reason == "tool_calls"
    assert events[-1].usage.completion_tokens == len(turn('!add {"a": 1}')) and unused == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 4}, "n = 4: one completion for each request; send several requests"),
        ({"response_format": {"type": "json_object"}}, "it changes the distribution from which the policy is trained"),
        ({"tool_choice": "required", "tools": [TOOL]}, "use auto or none"),
        ({"logprobs": True}, "they stay in the generator"),
        ({"max_tokens": 0}, "it has to be a positive number"),
        ({"stop": ["x" * 1000]}, "stop: at most 16 texts of at most 200 characters"),
        ({"messages": []}, "a list of 1 to 4096 messages"),
        ({"messages": [{"role": "poet", "content": "x"}]}, "the role 'poet'; there are system, user, assistant, tool"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
            "part of type 'image_url'; the policy reads text only",
        ),
        (
            {"messages": [{"role": "user", "content": "y" * WINDOW}]},
            "This model's maximum context length is 400 tokens",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(options: dict[str, Any], message: str) -> None:
    async def agent(client: openai.AsyncOpenAI, access: Access) -> Any:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client, **({"messages": [USER]} | options))
        return refused.value

    error, policy, _ = play(agent)
    assert message in str(error) and not policy.wishes
    if "maximum context" in message:
        assert error.code == "context_length_exceeded" and policy.session.refused is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reasoning_effort", "low"),
        ("functions", [TOOL["function"]]),
        ("parallel_tool_calls", False),
        ("min_tokens", 5),
        ("ignore_eos", True),
        ("guided_choice", ["a", "b"]),
        ("continue_final_message", True),
        ("a_field_of_next_year", 1),
    ],
)
def test_a_field_that_would_change_what_is_read_or_sampled_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(GatewayError, match=f"{name} = "):
        chat_request({"messages": [USER], name: value}, b"", {}, {})


def test_options_of_the_template_are_taken_if_they_are_those_of_the_run() -> None:
    own = {"enable_thinking": False, "style": "terse"}
    for options in (own, {"enable_thinking": False}, {}, None):
        chat_request({"messages": [USER], "chat_template_kwargs": options}, b"", {}, own)
    for options, message in (
        ({"style": "terse", "enable_thinking": True}, "enable_thinking = True: in the run it is False; set data.templ"),
        ({"depth": 3}, "depth = 3: in the run it is not set; set data.template_options"),
    ):
        with pytest.raises(GatewayError, match=rf"chat_template_kwargs\.{message}"):
            chat_request({"messages": [USER], "chat_template_kwargs": options}, b"", {}, own)
    with pytest.raises(GatewayError, match="an object is required"):
        chat_request({"messages": [USER], "chat_template_kwargs": "no"}, b"", {}, own)


def test_fields_without_an_effect_and_defaults_are_taken() -> None:
    """Also None, by which clients say that a field is not set."""
    fields = {"model": "m", "user": "u", "n": 1, "min_tokens": 0, "parallel_tool_calls": True, "guided_choice": None}
    request = chat_request({"messages": [USER], "temperature": 0.5, "logprobs": False, **fields}, b"", {}, {})
    assert request.max_tokens is None and request.stop == ()


def test_keys_ends_and_turns_are_checked() -> None:
    async def agent(client: openai.AsyncOpenAI, access: Access) -> Any:
        await ask(client, [USER])
        with pytest.raises(openai.BadRequestError, match="max_turns = 1"):
            await ask(client, [USER])
        with pytest.raises(openai.AuthenticationError, match="has another key"):
            await ask(client.with_options(api_key="guessed"), [USER])
        other = access.base_url.replace("7.0.1", "7.0.2")
        with pytest.raises(openai.APIStatusError, match=r"episode 7.0.2 is over, or never began") as gone:
            await ask(client.with_options(base_url=other), [USER])
        assert gone.value.status_code == 410
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {access.api_key}"}) as http:
            posted = await http.post(f"{access.base_url}/reward", json={"reward": 0.5, "parts": {"a": 1.0}})
            missing = await http.get(f"{access.base_url}/nothing")
            broken = await http.post(f"{access.base_url}/chat/completions", data=b"{")
            assert (posted.status, missing.status, broken.status) == (200, 404, 400)
            assert "the body is no JSON" in (await broken.json())["error"]["message"]
        models = await client.models.list()
        return [model.id for model in models.data]

    models, policy, _ = play(agent, "one", turns=1)
    assert models == ["policy"] and policy.session.posted == {"score": 0.5, "a": 1.0}


def test_clients_reach_the_gateway_without_the_proxy_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "example.org")

    async def agent(client: openai.AsyncOpenAI, access: Access) -> Any:
        async with client.with_options(max_retries=0) as direct:
            return await ask(direct, [USER])

    answer, _, _ = play(agent, "one")
    assert answer.message.content == "one" and os.environ["no_proxy"].startswith("example.org,")


def test_a_session_that_is_over_refuses_and_ends_who_waits() -> None:
    async def run() -> None:
        session = Session("0", CharacterDialogue(), Limits(WINDOW, 50, 8, 1.0, 1.0), lambda wish, tokens: None)
        waiting = asyncio.ensure_future(session.complete(chat_request({"messages": [USER]}, b"1", {}, {})))
        await asyncio.sleep(0)
        session.close()
        for request in (waiting, session.complete(chat_request({"messages": [USER]}, b"2", {}, {}))):
            with pytest.raises(GatewayError, match="episode 0 is over"):
                await request

    asyncio.run(run())
