"""The reward model's process, which scores for the reward workers of all generators."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import structlog
import torch
from transformers import AutoModelForSequenceClassification

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.rewards.calling import describe
from asyncrl.rewards.reward_model import KEY, WAY_OUT, check_model_folder, model_options
from asyncrl.util.model_files import load_tokenizer, render_chat, start_tokens
from asyncrl.util.processes import peak_memory_bytes
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import Message
from asyncrl.wire.messages import Error, Memory
from asyncrl.wire.rpc import Connection, Reply, Server, announce
from asyncrl.wire.service_messages import MAX_TEXT_HEADER_BYTES, Score, Scores

log = structlog.get_logger()

REPORT_S = 5.0
"""Pause between two reports of the memory to the replay queue."""
TICK_S = 0.05
"""Longest wait of the loop, and so the delay of a signal."""
RECEIVE_AT_ONCE = 256
RECEIVE_BYTES_AT_ONCE = 1 << 20
"""Limits of one round, since all its requests are tokenized before any of them is answered."""


@dataclass(slots=True)
class _ScoreRequest:
    message: Message
    deadline_s: float
    tokens: list[list[int]] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class RewardModel:
    """A loaded reward model."""

    def __init__(
        self,
        path: str,
        *,
        dtype: str = "float32",
        tokens_per_batch: int = 16384,
        device: str = "auto",
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Loads the model. `template_options` are variables of its chat template. Raises ConfigError when the folder
        does not hold a model with one trained score."""
        check_model_folder(path)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.path = path
        self.tokens_per_batch = tokens_per_batch
        self.tokenizer = load_tokenizer(path)
        self._start = start_tokens(self.tokenizer)
        self._template_options = dict(template_options or {})
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=getattr(torch, dtype), use_safetensors=True, output_loading_info=True
        )
        if info["missing_keys"]:
            raise ConfigError(
                f"{KEY}.path = {path!r}: its weights lack {', '.join(sorted(info['missing_keys']))}, which would be "
                f"random; {WAY_OUT}"
            )
        self.model = model.to(device).eval()
        text_config = model.config.get_text_config()
        self.window: int | None = getattr(text_config, "max_position_embeddings", None)
        self._vocabulary: int = text_config.vocab_size
        self._pad_token = text_config.pad_token_id

    def tokenize(
        self, prompt: str | list[dict[str, Any]], completion: str, options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The tokens of a prompt with its completion; `options` are the row's, of the chat template. Raises ValueError
        when they cannot be scored."""
        if isinstance(prompt, str):
            tokens: list[int] = self.tokenizer(prompt + completion)["input_ids"]
            size = len(self._start)
            tokens = tokens[size:] if tokens[size : 2 * size] == self._start else tokens
        elif self.tokenizer.chat_template is None:
            raise ValueError(f"the reward model's tokenizer in {self.path} has no chat template, and prompts are chats")
        else:
            messages = [*prompt, {"role": "assistant", "content": completion}]
            if prompt and prompt[-1]["role"] == "assistant":  # whose words the completion continues
                messages = [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}{completion}"}]
            options = self._template_options | dict(options or {})
            tokens = render_chat(self.tokenizer, messages, options, generate=False)
        if not tokens or (self.window is not None and len(tokens) > self.window):
            raise ValueError(
                f"prompt and completion are {len(tokens)} tokens for the reward model, its window is {self.window}: "
                "lower generator.max_new_tokens or data.max_prompt_tokens, or take another model"
            )
        if max(tokens) >= self._vocabulary:
            raise ValueError(
                f"token {max(tokens)} of the reward model's tokenizer in {self.path} is outside the model's vocabulary "
                f"of {self._vocabulary}: the folder needs the tokenizer that the model was trained with"
            )
        return tokens

    def score(self, texts: Sequence[list[int]]) -> list[float]:
        """The scores of tokenized texts; a score does not depend on the other texts of its batch."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
        scores = [0.0] * len(texts)
        while order:
            size = max(1, self.tokens_per_batch // len(texts[order[0]]))
            batch, order = order[:size], order[size:]
            for index, score in zip(batch, self._forward([texts[index] for index in batch]), strict=True):
                scores[index] = score
        return scores

    @torch.inference_mode()
    def _forward(self, texts: list[list[int]]) -> list[float]:
        pad = self._pad_token
        if pad is None:
            # The model takes the score at the last token that is not padding, so pad with a token that no text ends in.
            last = {tokens[-1] for tokens in texts}
            pad = next(token for token in range(len(last) + 1) if token not in last)
            self.model.config.get_text_config().pad_token_id = pad
        length = max(map(len, texts))
        tokens = torch.full((len(texts), length), pad)
        mask = torch.zeros((len(texts), length), dtype=torch.long)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        device = self.model.device
        logits = self.model(input_ids=tokens.to(device), attention_mask=mask.to(device)).logits
        return logits.float().squeeze(-1).tolist()


class ModelServer:
    """Serves a reward model; requests that wait together are scored in common batches."""

    def __init__(self, model: RewardModel, endpoints: Endpoints) -> None:
        self.model = model
        self._requests: list[_ScoreRequest] = []
        """Requests received in this round."""
        self._queue = Connection(endpoints, linger_s=0.0) if endpoints.replay else None
        """None when there is no run."""
        self._next_report_s = 0.0
        self._server = Server(
            endpoints,
            endpoints.reward_model,
            "reward model",
            {Score: self._accept},
            max_frame_bytes=2 * MAX_TEXT_HEADER_BYTES,  # so that a request slightly above the limit gets an answer
        )
        announce(endpoints, endpoints.reward_model, self._server.address)

    def serve(self, should_stop: Callable[[], bool]) -> None:
        """Answers until `should_stop()`. Waits for a request of a reward worker, at most TICK_S; the requests that have
        arrived until then are scored together, and those whose deadline has passed are not answered."""
        while not should_stop():
            if self._server.poll(TICK_S):
                self._answer(self._receive())
            self._report(time.monotonic())

    def close(self) -> None:
        """Closes the sockets."""
        self._server.close()
        if self._queue is not None:
            self._queue.close()

    def _report(self, now_s: float) -> None:
        """Sends the peak of the memory to the replay queue when it is due, and drops the answer to the last report."""
        if self._queue is not None and now_s >= self._next_report_s:
            self._next_report_s = now_s + REPORT_S
            answer = self._queue.receive(0.0)
            if answer is not None and isinstance(answer.body, Error):
                log.warning("the replay queue refused a report of the memory", error=answer.body.text)
            self._queue.send(Memory("reward_model", peak_memory_bytes()))

    def _receive(self) -> list[_ScoreRequest]:
        self._requests, num_bytes = [], 0
        for _ in range(RECEIVE_AT_ONCE):
            size = self._server.handle_next() if num_bytes < RECEIVE_BYTES_AT_ONCE else None
            if size is None:
                break
            num_bytes += size
        return self._requests

    def _accept(self, message: Message) -> None:
        body: Score = message.body
        request = _ScoreRequest(message, time.monotonic() + body.timeout_s)
        for completion in body.completions:
            tokens, error = [], ""
            try:
                tokens = self.model.tokenize(body.prompt, completion, body.template_options)
            except Exception as problem:  # templates may raise anything; it fails one completion
                error = describe(problem)
            request.tokens.append(tokens)
            request.errors.append(error)
        request.scores = [None] * len(request.tokens)
        self._requests.append(request)

    def _answer(self, requests: list[_ScoreRequest]) -> None:
        now_s = time.monotonic()
        live = [request for request in requests if request.deadline_s > now_s]
        places = [(request, index) for request in live for index, error in enumerate(request.errors) if not error]
        self._score(places)
        for request in live:
            self._server.send(request.message.peer, request.message.seq, Reply(Scores(request.scores, request.errors)))

    def _score(self, places: list[tuple[_ScoreRequest, int]]) -> None:
        try:
            scores = self.model.score([request.tokens[index] for request, index in places])
        except Exception as error:  # out of memory, or any error of the model's code: it fails only these texts
            log.error("reward model failed", error=describe(error), texts=len(places), exc_info=True)
            for request, index in places:
                request.errors[index] = f"the reward model failed: {describe(error)}"
            return
        for (request, index), score in zip(places, scores, strict=True):
            if math.isfinite(score):
                request.scores[index] = score
            else:
                request.errors[index] = f"the reward model gave {score}"


def run_reward_model(config: Config, *, endpoints: Endpoints, should_stop: Callable[[], bool]) -> None:
    """Runs the reward model's process until `should_stop()`; one serves all generators.

    Needed if `uses_reward_model(config)`. It binds `endpoints.reward_model` after the model is loaded; earlier requests
    wait in the workers' queues and fail after generator.reward_timeout_s, so generators should start later. Raises
    ConfigError when the model cannot be used or the address is taken.
    """
    options = cast("dict[str, Any]", model_options(config))
    model = RewardModel(**options, template_options=config.data.template_options)
    server = ModelServer(model, endpoints)
    log.info("reward model is up", path=model.path, device=str(model.model.device), window=model.window)
    try:
        server.serve(should_stop)
    finally:
        server.close()
