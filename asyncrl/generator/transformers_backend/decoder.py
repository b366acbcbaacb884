"""The policy with its key-value cache: logits for the last token of each row, and weights overwritten in place.

Decoding is checked against the model's own forward pass before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from asyncrl.colocate import HostMemory
from asyncrl.config.config import Config
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.generator.engine import CPU_KV_CACHE_BYTES, GPU_FRACTION, STEP_TOKENS, Shapes, check_fit
from asyncrl.generator.transformers_backend.attention import PAGED, choose_kernel, padded_attention
from asyncrl.generator.transformers_backend.cache import HeadShape, PagedCache, Row, StepBatch, sort_rows, token_bytes
from asyncrl.util.model_files import Routers, replayed_routers, router_modules
from asyncrl.weights.layout import WeightPart
from asyncrl.weights.model_tensors import (
    ADAPTER,
    MATRIX_NAMES,
    MergedWeights,
    adapted_layers,
    adapter_shapes,
    matrices_of,
    peft_settings,
)

log = structlog.get_logger()


class Decoder:
    """A model on the first GPU, or on the CPU. Its cache gets the memory that a forward pass of a full step leaves."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError if the model cannot be decoded, or the memory is too small."""
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self._model, self._output = load_model(config, self.device)
        self.loader = make_loader(config, self._model)
        self._freed: list[tuple[torch.UntypedStorage, int]] = []
        """The memory that `free` dropped, and its size."""
        self._host = HostMemory(self.device)
        routers = replayed_routers(
            config.algorithm.routing_replay, config.model.path, trust_remote_code=config.model.trust_remote_code
        )
        self.routers = None if routers is None else RoutingRecorder(self._model, routers, config.model.path)
        """Records the experts of every step; None without `algorithm.routing_replay`."""
        text, dtype = self._model.config.get_text_config(), self._model.dtype
        self.window_tokens: int = config.generator.max_model_tokens or text.max_position_embeddings
        """The longest sequence, of prompt and completion."""
        self.step_tokens = int(
            config.generator.engine_settings.get("max_num_batched_tokens") or STEP_TOKENS[self.device.type]
        )
        if config.deterministic:
            self.step_tokens = max(self.step_tokens, self.window_tokens)  # prompts are not split
        self._kernel = padded_attention
        shapes = self._shapes(self.step_tokens if self.device.type == "cuda" else 2)
        self._kernel, page_tokens = choose_kernel(shapes, text.num_attention_heads, dtype=dtype, device=self.device)
        pages = self._num_pages(config, token_bytes(shapes, dtype), page_tokens, text.vocab_size)
        self.cache = PagedCache(shapes, num_pages=pages, page_tokens=page_tokens, dtype=dtype, device=self.device)
        self._check(text.vocab_size)

    def free(self, *, keep_weights: bool) -> None:
        """Gives up the memory of the cache and of the parameters, which move to the host or are dropped."""
        self.cache.free()
        if keep_weights:
            self._host.offload(self._model.parameters())
        else:
            for storage in [parameter.untyped_storage() for parameter in self._model.parameters()]:
                if storage.resizable() and storage.nbytes():
                    self._freed.append((storage, storage.nbytes()))
                    storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore_weights(self) -> None:
        """Takes the memory of the parameters back; if they were dropped, a version must fill it."""
        self._host.reload()
        for storage, num_bytes in self._freed:
            storage.resize_(num_bytes)
        self._freed = []

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Returns the logits [rows, vocabulary] for the last token of each row, in float32. The rows have the order of
        `sort_rows`."""
        batch = StepBatch(rows, self.cache, self.device)
        hidden = self._hidden(batch).index_select(0, batch.last)
        output = self._output
        if hidden.is_cuda and hidden.dtype is not torch.float32 and isinstance(output, nn.Linear):
            # As in the learner: not rounded to 16 bits.
            logits = torch.mm(hidden, output.weight.t(), out_dtype=torch.float32)
            return logits if output.bias is None else logits + output.bias
        return output(hidden).float()

    def _hidden(self, batch: StepBatch) -> Tensor:
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
        batch = StepBatch([Row([0] * length, 0, [])] * max(1, tokens // length), None, self.device)
        with torch.inference_mode():
            fits(self._model, lambda: self._hidden(batch))
        if not batch.shapes:
            raise misfit(self._model, "its attention cannot be replaced")
        return batch.shapes

    def _num_pages(self, config: Config, token_bytes: int, page_tokens: int, vocabulary: int) -> int:
        """Returns the number of pages of the cache, by `generator.kv_cache_bytes` or the rest of the GPU, but no more
        than all sequences can fill. Raises ConfigError if one sequence of the window does not fit."""
        sequences = config.generator.max_running_groups * config.generator.group_size
        cache_bytes, page_bytes = config.generator.kv_cache_bytes, page_tokens * token_bytes
        if cache_bytes is None:
            on_gpu = self.device.type == "cuda"
            cache_bytes = _left_bytes(config, sequences * vocabulary) if on_gpu else CPU_KV_CACHE_BYTES
        least = -(-self.window_tokens // page_tokens)
        pages = min(cache_bytes // page_bytes, sequences * least)
        if pages < least:
            raise ConfigError(
                f"generator.kv_cache_bytes: a sequence of {self.window_tokens:,} tokens needs {least * page_bytes:,} "
                f"bytes of keys and values, but there are {max(cache_bytes, 0):,}; raise it, or lower "
                "generator.engine_options.max_model_len"
            )
        log.info("key-value cache", tokens=pages * page_tokens, bytes=pages * page_bytes, page_tokens=page_tokens)
        return pages

    def _check(self, vocabulary: int) -> None:
        """Raises ConfigError unless the model decodes as its own forward pass computes: split prompts, single tokens,
        and both in one step."""
        # Tokens that are spread over the vocabulary.
        prompts = [[(7919 * i * i + 104729 * i + 11 + 31 * n) % vocabulary for i in range(n)] for n in LENGTHS]
        prompts = [tokens[: self.window_tokens] for tokens in prompts]
        own_logits = [fits(self._model, lambda tokens=tokens: self._own_logits(tokens)) for tokens in prompts]
        pages: list[list[int]] = [[] for _ in prompts]
        ends = [0] * len(prompts)
        decoded: list[Tensor] = []
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
            decoded += fits(self._model, lambda rows=[rows[i] for i in order]: self.logits(rows))
            expected += [own_logits[members[i]][rows[i].end - 1] for i in order]
        for of_prompt in pages:
            self.cache.give_back(of_prompt)
        wanted = torch.stack(expected)
        difference = float((torch.stack(decoded) - wanted).norm() / wanted.norm())
        tolerance = TOLERANCES[self._model.dtype]
        if not difference <= tolerance:
            raise misfit(
                self._model,
                f"its logits differ by {difference:.2g} of their norm from those of its own forward pass, but rounding "
                f"explains at most {tolerance:g}: it has a state beside keys and values, or changes its logits",
            )

    def _own_logits(self, tokens: list[int]) -> Tensor:
        """Returns the logits [tokens, vocabulary] of the model's own attention."""
        self._model.set_attn_implementation("eager")
        try:
            call: Any = self._model
            return call(torch.tensor([tokens], device=self.device), use_cache=False).logits[0].float()
        finally:
            self._model.set_attn_implementation(PAGED)


CONTEXT_BYTES = 1 << 30
"""CUDA's context and the workspaces of its libraries."""


SAMPLER_COPIES = 5
"""Arrays in float32 of the size of the logits that sampling holds at the same time."""


def _left_bytes(config: Config, logits: int) -> int:
    """Returns the bytes of this process's share of the GPU that weights and steps leave. The peak occurs in a step
    without logits."""
    fraction = float(os.environ.get(GPU_FRACTION, config.generator.gpu_memory_utilization))
    free, total = torch.cuda.mem_get_info()
    used = torch.cuda.max_memory_reserved() + SAMPLER_COPIES * 4 * logits + CONTEXT_BYTES
    held = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
    return min(int(fraction * total) - used, free - held - SAMPLER_COPIES * 4 * logits)


UNFIT = (AttributeError, IndexError, KeyError, NotImplementedError, TypeError)
"""Errors raised by a model that does not support a custom attention or the keyword arguments of a batch."""


HOW_TO_FIX = (
    "decoding needs a model whose layers mix tokens by plain attention alone, such as Llama, Qwen3 or Gemma 3 "
    "(docs/models.md has a table)"
)


TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Upper limit of the distance between logits of paged decoding and of the model's own attention, relative to the norm
of the latter. Rounding causes 1e-6 in float32 and up to 0.03 in bfloat16."""


LENGTHS = (12, 9)
"""Tokens of the sequences by which decoding is checked."""


CHECKED = ((5, 0), (3, 4), (1, 3), (1, 1), (1, 1), (1, 0))
"""Tokens of each that a step of the check computes."""


def load_model(config: Config, device: torch.device) -> tuple[PreTrainedModel, nn.Module]:
    """Returns the causal language model at `model.path`, and its output layer. Raises ConfigError if it cannot be
    decoded."""
    disable_progress_bar()
    key = f"model.path = {config.model.path!r}"
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            config.model.path,
            dtype=getattr(torch, config.model.dtype),
            attn_implementation=PAGED,
            trust_remote_code=config.model.trust_remote_code,
            use_safetensors=True,  # other formats are pickles
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: the model cannot be loaded: {error}") from error
    except UNFIT as error:
        raise ConfigError(
            f"{key}: the model cannot be loaded for paged decoding ({type(error).__name__}: {error}); {HOW_TO_FIX}"
        ) from error
    output = model.get_output_embeddings()
    if not isinstance(output, nn.Module):
        raise ConfigError(f"{key}: {type(model).__name__} has no output layer; use a causal language model")
    return model.to(device).eval().requires_grad_(False), output  # type: ignore[arg-type]


def fits(model: PreTrainedModel, forward: Callable[[], Tensor]) -> Tensor:
    """Returns what a forward pass of the model returns. Raises ConfigError for an error that shows that the model
    cannot be decoded."""
    try:
        return forward()
    except (AsyncrlError, torch.OutOfMemoryError):
        raise
    except (*UNFIT, RuntimeError, ValueError) as error:
        raise misfit(model, f"{type(error).__name__}: {error}") from error


def misfit(model: PreTrainedModel, why: str) -> ConfigError:
    """Returns the error for a model that cannot be decoded."""
    return ConfigError(
        f"model.path = {model.name_or_path!r}: a model of type {model.config.model_type} cannot be decoded ({why}); "
        f"{HOW_TO_FIX}"
    )


class ParameterLoader:
    """Loads versions of all parameters of the model, tied ones once. On a GPU the copies may end after the return, in
    the order of the thread's stream."""

    def __init__(self, path: str, named: Iterable[tuple[str, Tensor]]) -> None:
        self.updating = False
        self.committed: Callable[[int], None] = lambda version: None
        """Called with each version once it is loaded."""
        self._path = path
        self._parameters = dict(named)
        self._shapes: Shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def takes_rows(self, name: str) -> bool:
        return True

    def bucket_memory(self, num_bytes: int) -> Tensor | None:
        return None

    def begin(self, version: int, shapes: Shapes) -> None:
        check_fit(version, shapes, self._shapes, self._path)
        self.updating = True

    def commit(self, version: int) -> None:
        self.updating = False
        self.committed(version)

    @torch.no_grad()
    def load(self, parts: Iterable[WeightPart]) -> None:
        for part in parts:
            parameter, first = self._parameters[part.name], part.first_row
            (parameter if first is None else parameter[first : first + len(part.tensor)]).copy_(part.tensor)


class MergedAdapters(ParameterLoader):
    """Loads the weights of the adapted layers, whose original values are in host memory."""

    def __init__(self, config: Config, model: PreTrainedModel) -> None:
        settings = config.learner.lora
        layers = adapted_layers(model, settings)
        super().__init__(config.model.path, ((f"{name}.weight", layer.weight) for name, layer in layers.items()))
        self._base = {name: weight.to("cpu", copy=True) for name, weight in self._parameters.items()}
        self._scale, self._device = settings.scale, model.device
        self._shapes = adapter_shapes(model, settings)

    def load(self, parts: Iterable[WeightPart]) -> None:
        """Overwrites the weights by the original ones plus the adapters, which come at once."""
        sent = [(part.name, part.tensor) for part in parts]
        weights = MergedWeights(self._base, sent, self._scale, device=self._device).items()
        super().load(WeightPart(name, weight) for name, weight in weights)


def make_loader(config: Config, model: PreTrainedModel) -> ParameterLoader:
    """Returns the loader for `learner.lora`. Puts adapters that are not merged into the model; they change nothing
    before the first version."""
    settings = config.learner.lora
    if not settings.rank:
        return ParameterLoader(config.model.path, model.named_parameters())
    if settings.load == "merged":
        return MergedAdapters(config, model)
    from peft import inject_adapter_in_model

    names = list(adapted_layers(model, settings))
    inject_adapter_in_model(peft_settings(model, settings, config.model.path), model, ADAPTER)
    model.eval().requires_grad_(False)
    matrices = {name: matrices_of(model.get_submodule(name)) for name in names}
    sent = (
        (pattern.format(name), matrix)
        for name, of in matrices.items()
        for pattern, matrix in zip(MATRIX_NAMES, of, strict=True)
    )
    return ParameterLoader(config.model.path, sent)


class RoutingRecorder:
    """Hooks on the routers of a model, which keep the experts of the latest forward pass."""

    def __init__(self, model: nn.Module, routers: Routers, path: str) -> None:
        self._routers = routers
        self._chosen: list[Tensor] = [torch.empty(0)] * routers.layers
        for layer, module in enumerate(router_modules(model, routers, path)):
            module.register_forward_hook(partial(self._keep, layer))

    def _keep(self, layer: int, module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._chosen[layer] = output[2]

    def new_record(self, tokens: int) -> NDArray[np.uint8]:
        """Returns zeros for the experts of a sequence of at most this many tokens."""
        return np.zeros((tokens, self._routers.layers, self._routers.chosen), dtype=np.uint8)

    def taken(self, lengths: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Returns the experts [length, layers, chosen] of the latest forward pass, of rows of these lengths."""
        chosen = torch.stack(self._chosen, dim=1).to(torch.uint8).cpu().numpy()
        return np.split(chosen, np.cumsum(lengths)[:-1])
