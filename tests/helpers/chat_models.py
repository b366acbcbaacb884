"""Small tokenizers with merges, and chat templates in the manner of families of models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Tools:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nCall one as <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and KEEPS_REASONING %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
QWEN = CHATML.replace("KEEPS_REASONING", "true")
"""Copies contents; the answers of tools are messages of the user, all in one turn."""
STRIPPING = CHATML.replace("KEEPS_REASONING", "loop.last")
"""Does not show the reasoning of earlier turns."""
LAST_USER = """\
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
"""
THINKING = LAST_USER + CHATML.replace("KEEPS_REASONING", "loop.index0 > ns.last_user")
"""Shows the reasoning after the last message of the user only, as Qwen3's."""
GENERATION = "add_generation_prompt %}{{- '<|im_start|>assistant\\n"
OPENING = THINKING.replace(GENERATION, f"{GENERATION}<think>\\n")
"""The same, and its generation prompt opens the reasoning."""
TEXT_ARGUMENTS = THINKING.replace("(call.function.arguments | tojson)", "call.function.arguments")
"""The same, and the arguments of calls have to be texts."""
TOOLLESS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set system = 'You help.' %}{%- set rest = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system }}
{%- for tool in tools or [] %}{{- '\\n\\n' + (tool | tojson(indent=4)) }}{%- endfor %}
{{- '<|eot_id|>' }}
{%- for message in rest %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- (message.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
"""Trims contents, and writes the answers of tools as JSON."""
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.first %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids of calls have 9 characters') }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('no role ' + message.role) }}{%- endif %}
{%- endfor %}
"""
"""Has no generation prompt, checks the ids of calls, and refuses other roles."""
HARMONY = """\
{%- for tool in tools or [] %}{{- '<|start|>developer<|message|>' + (tool | tojson) + '<|end|>' }}{%- endfor %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- (call.arguments | tojson) + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last else '<|end|>' }}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
"""gpt-oss: a turn has channels."""
MISTRAL_TOKENS = ["INST", "/INST", "TOOL_CALLS", "TOOL_RESULTS", "/TOOL_RESULTS", "AVAILABLE_TOOLS", "/AVAILABLE_TOOLS"]
HARMONY_TOKENS = [f"<|{name}|>" for name in ("start", "message", "end", "channel", "call", "return")]
FAMILIES: dict[str, tuple[str, Sequence[str], str, str]] = {
    "qwen": (QWEN, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|endoftext|>", "<|im_end|>"),
    "llama": (
        LLAMA,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "mistral": (
        MISTRAL,
        ["<s>", "</s>", *(f"[{name}]" for name in MISTRAL_TOKENS)],
        "<s>",
        "</s>",
    ),
}
"""Template, special tokens, and which of them begin a text and end a turn."""
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
"""Tokens of the first family that are not special."""
SPLIT = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)
CORPUS = [
    "The calculator says that the value of the expression is twelve. What is the price of the item?",
    '{"name": "evaluate", "arguments": {"expression": "12 * 34"}}\n{"type": "function"}\n=\n==\n:\n\n',
    "user assistant system tool ipython hello hello yellow follow the answer is 42.\n\nI think so.\n",
] * 8


def save_chat_model(
    folder: Path,
    family: str = "qwen",
    *,
    template: str | None = None,
    special: Sequence[str] = (),
    stop: str | None = None,
    vocabulary: int = 420,
) -> None:
    """Writes tokenizer and config of a model without weights. `stop` is its end-of-sequence token, by default that
    which ends a turn."""
    own, known, begin, end = FAMILIES[family]
    save_tokenizer(folder, [*known, *special], TAGS if family == "qwen" else [], vocabulary)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": stop or end,
        "chat_template": template or own,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    config: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": len(ids)}
    config |= {"bos_token_id": ids[begin], "eos_token_id": ids[stop or end]}
    (folder / "config.json").write_text(json.dumps(config))


def save_tokenizer(folder: Path, special: Sequence[str], tags: Sequence[str], vocabulary: int) -> None:
    """A byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
