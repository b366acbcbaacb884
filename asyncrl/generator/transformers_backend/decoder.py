"""The policy with its key-value cache: logits behind the rows of a step, and weights that are overwritten in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.config.config import Config
from asyncrl.generator.transformers_backend.attention import padded_attention
from asyncrl.generator.transformers_backend.batch import Batch, Row, sort_rows
from asyncrl.generator.transformers_backend.cache import HeadShape, PagedCache
from asyncrl.generator.transformers_backend.loading import (
    CHECKED,
    check_logits,
    fits,
    load_model,
    misfit,
    own_logits,
    sequences,
)
from asyncrl.generator.transformers_backend.parameters import parameters_of
from asyncrl.generator.transformers_backend.routing import RoutingRecorder
from asyncrl.generator.transformers_backend.sizes import cache_pages, step_tokens, window_of
from asyncrl.generator.transformers_backend.varlen import choose_kernel
from asyncrl.util.host_memory import HostMemory
from asyncrl.util.model_files import replayed_routers
from asyncrl.weights.layout import WeightPart


class Decoder:
    """A model on the first GPU, or on the CPU. Its cache gets the memory that a forward pass of a full step leaves."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError if the model cannot be decoded, or the memory is too small."""
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self._model, self._output = load_model(config, self.device)
        self._parameters = parameters_of(config, self._model)
        self._freed: list[tuple[torch.UntypedStorage, int]] = []
        """The memory that `free` dropped, and its size."""
        self._host = HostMemory(self.device)
        routers = replayed_routers(
            config.algorithm.routing_replay, config.model.path, trust_remote_code=config.model.trust_remote_code
        )
        self.routers = None if routers is None else RoutingRecorder(self._model, routers, config.model.path)
        """Records the experts of every step; None without `algorithm.routing_replay`."""
        self.window_tokens = window_of(config, self._model)
        self.step_tokens = step_tokens(config, self.device, self.window_tokens)
        text, dtype = self._model.config.get_text_config(), self._model.dtype
        self._kernel = padded_attention
        shapes = self._shapes(self.step_tokens if self.device.type == "cuda" else 2)
        self._kernel, page_tokens = choose_kernel(shapes, text.num_attention_heads, dtype=dtype, device=self.device)
        pages = cache_pages(
            config,
            shapes,
            page_tokens=page_tokens,
            window=self.window_tokens,
            vocabulary=text.vocab_size,
            dtype=dtype,
            device=self.device,
        )
        self.cache = PagedCache(shapes, num_pages=pages, page_tokens=page_tokens, dtype=dtype, device=self.device)
        self._check(text.vocab_size)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors of a version."""
        return self._parameters.shapes

    def load(self, parts: Sequence[WeightPart]) -> None:
        """Loads weights. On a GPU the copies may end after the return, in the order of the thread's stream."""
        self._parameters.load(parts)

    def free(self, *, keep_weights: bool) -> None:
        """Gives up the memory of the cache and of the parameters, which move to the host or are dropped."""
        self.cache.free()
        if keep_weights:
            self._host.offload(self._model.parameters())
        else:
            memory = [parameter.untyped_storage() for parameter in self._model.parameters()]
            self._freed = [(one, one.nbytes()) for one in memory if one.resizable() and one.nbytes()]
            for one, _ in self._freed:
                one.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore_weights(self) -> None:
        """Takes the memory of the parameters back; if they were dropped, `load` must fill it."""
        self._host.reload()
        for one, num_bytes in self._freed:
            one.resize_(num_bytes)
        self._freed = []

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Returns the logits [rows, vocabulary] behind each row, in float32. The rows have the order of `sort_rows`."""
        batch = Batch(rows, self.cache, self.device)
        hidden = self._hidden(batch).index_select(0, batch.last)
        output = self._output
        if hidden.is_cuda and hidden.dtype is not torch.float32 and isinstance(output, nn.Linear):
            # As in the learner: not rounded to 16 bits.
            logits = torch.mm(hidden, output.weight.t(), out_dtype=torch.float32)
            return logits if output.bias is None else logits + output.bias
        return output(hidden).float()

    def _hidden(self, batch: Batch) -> Tensor:
        """Returns the last hidden states [tokens, size] of a batch."""
        body: Any = self._model.base_model
        return body(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.position_ids.unsqueeze(0),
            paged=batch,
            kernel=self._kernel,
            use_cache=False,
        ).last_hidden_state[0]

    def _shapes(self, tokens: int) -> Mapping[int, HeadShape]:
        """Returns the keys and values of each layer, by a forward pass of this many tokens."""
        length = min(tokens, self.window_tokens - 1)
        batch = Batch([Row([0] * length, 0, [])] * max(1, tokens // length), None, self.device)
        with torch.inference_mode():
            fits(self._model, lambda: self._hidden(batch))
        if not batch.shapes:
            raise misfit(self._model, "its attention cannot be replaced")
        return batch.shapes

    def _check(self, vocabulary: int) -> None:
        """Raises ConfigError unless the model decodes as its own forward pass computes: split prompts, single tokens,
        and both in one step."""
        prompts = [tokens[: self.window_tokens] for tokens in sequences(vocabulary)]
        own = [fits(self._model, lambda one=one: own_logits(self._model, one, self.device)) for one in prompts]
        pages: list[list[int]] = [[] for _ in prompts]
        ends = [0] * len(prompts)
        found: list[Tensor] = []
        expected: list[Tensor] = []
        for counts in CHECKED:
            members: list[int] = []
            rows: list[Row] = []
            for index, count in enumerate(counts):
                if tokens := prompts[index][ends[index] : ends[index] + count]:
                    start, ends[index] = ends[index], ends[index] + len(tokens)
                    self.cache.extend(pages[index], ends[index])
                    members.append(index)
                    rows.append(Row(tokens, start, pages[index]))
            order = sort_rows(rows)
            found += fits(self._model, lambda rows=[rows[i] for i in order]: self.logits(rows))
            expected += [own[members[i]][rows[i].end - 1] for i in order]
        for owned in pages:
            self.cache.give_back(owned)
        check_logits(self._model, torch.stack(found), torch.stack(expected))
