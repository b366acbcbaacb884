"""Measures the gateway's processor time of a request: conversations with a tool, many at once, under a chat template,
with a policy that answers at once. Clients run in another process."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.frame import Limit, Round, Row
from benchmarks.replay_queue import processor_s

TURNS, EPISODES, QUICK_EPISODES = 6, 400, 50
READY_S = 60.0
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Finds pages.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "count": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "the price of the item", "count": 3}}\n</tool_call>'
SYSTEM, QUESTION, RESULT = "Answer with a tool. " * 20, "What is the price of the item? " * 4, "It costs twelve. " * 20
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def save_tokenizer(folder: Path) -> None:
    """Writes a byte-level BPE tokenizer with the template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([SYSTEM, QUESTION, RESULT, CALL] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def serve(folder: str, episodes: int, pipe: Connection) -> None:
    """Serves episodes until a message arrives on the pipe."""
    asyncio.run(_serve(folder, episodes, pipe))


async def _serve(folder: str, episodes: int, pipe: Connection) -> None:
    from asyncrl.environments.dialogue.dialogue import Dialogue
    from asyncrl.environments.episode import Limits, PolicyTurn
    from asyncrl.environments.gateway.gateway import Gateway
    from asyncrl.environments.gateway.openai_api import Access
    from asyncrl.environments.gateway.session import Session
    from asyncrl.wire.service_messages import NextTurn

    dialogue = Dialogue(folder, trust_remote_code=False, max_observation_tokens=2048).chat
    said = [*dialogue.rendering.encode(CALL), dialogue.ends.last]
    gateway, loop = Gateway(), asyncio.get_running_loop()
    await gateway.start()

    def opened(name: str) -> Access:
        def say(turn: NextTurn, tokens: list[int]) -> None:
            loop.call_soon(session.receive, turn.branch, PolicyTurn(said, "completed"))

        session = Session(name, dialogue, Limits(100_000, 500, TURNS, 600.0, 600.0), say)
        return gateway.open(session)

    pipe.send([tuple(opened(str(number))) for number in range(episodes)])
    await loop.run_in_executor(None, pipe.recv)
    await gateway.close()


async def converse(accesses: list[tuple[str, str]]) -> None:
    """Plays all conversations at once."""
    import aiohttp

    async def one(http: aiohttp.ClientSession, base_url: str, key: str) -> None:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
        url, headers = f"{base_url}/chat/completions", {"Authorization": f"Bearer {key}"}
        for number in range(TURNS):
            body = {"model": "policy", "messages": messages, "tools": [TOOL]}
            async with http.post(url, json=body, headers=headers, raise_for_status=True) as response:
                message = (await response.json())["choices"][0]["message"]
            call = message["tool_calls"][0]["id"]
            messages += [message, {"role": "tool", "tool_call_id": call, "content": f"{number}: {RESULT}"}]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(one(http, *access) for access in accesses))


def cost(episodes: int) -> Round:
    """Returns milliseconds of processor time of a request, and requests per second of a core and of the clock."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        process = context.Process(target=serve, args=(folder, episodes, its), daemon=True)
        process.start()
        if not ours.poll(READY_S):
            raise RuntimeError(f"the gateway has not started within {READY_S:g} s")
        accesses = ours.recv()
        used_s, began_s = processor_s(process.pid or 0), time.monotonic()
        asyncio.run(converse(accesses))
        used_s, took_s = processor_s(process.pid or 0) - used_s, time.monotonic() - began_s
        ours.send(None)
        process.join(READY_S)
    requests = episodes * TURNS
    return {"ms a request": 1e3 * used_s / requests, "requests/s of a core": requests / used_s,
            "requests/s": requests / took_s}  # fmt: skip


def measure(quick: bool) -> Iterator[Round]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    while True:
        yield cost(QUICK_EPISODES if quick else EPISODES)


ROW = Row(
    what=f"processor time of a request to the gateway, {EPISODES} conversations of {TURNS} turns with a tool at once",
    against="2 ms, and 300 requests/s of a core",
    limits={"ms a request": Limit(2.0, at_most=True), "requests/s of a core": Limit(300)},
    measure=measure,
)
