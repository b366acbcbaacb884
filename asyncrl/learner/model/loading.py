"""Loads models from their folders for packed rows, with dropout disabled.

With ZeRO stage 3 each rank reads its part of every parameter, and holds nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import structlog
import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_utils import set_zero3_state
from transformers.utils.logging import disable_progress_bar

from asyncrl.config.config import Config
from asyncrl.config.engine_options import merged as overridden
from asyncrl.errors import ConfigError
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.model.attention import PACKED, SequenceParallel
from asyncrl.util.files import is_weight_file, tensor_files
from asyncrl.weights.model_tensors import CheckpointTensor, check_tied, checkpoint_tensors, pieces, unexpected_tensors

HEADS = ("score", "classifier")
"""Attribute names of the head of a token-classification model."""
UNUSUAL_HEADS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Model settings that change logits after the output layer."""
UNFIT = (AttributeError, IndexError, KeyError, NotImplementedError, TypeError)
"""Errors raised by a model that does not support a custom attention or the keyword arguments of packed rows."""
HOW_TO_FIX = (
    "training needs packed rows; use a model whose layers mix tokens by plain attention alone, such as Llama, Qwen3 or "
    "Gemma 3 (docs/models.md has a table)"
)
log = structlog.get_logger()


def load_policy_model(config: Config, path: str, key: str = "model.path") -> PreTrainedModel:
    """Returns the causal language model at `path`, the value of the config key `key`. Raises ConfigError if it cannot
    be trained."""
    model, _ = _load(AutoModelForCausalLM, config, path, key)
    text_config = model.config.get_text_config()
    for name in UNUSUAL_HEADS:
        if getattr(text_config, name, None) not in (None, 1.0):
            raise ConfigError(f"{key} = {path!r}: models with {name} cannot be trained")
    return model


def load_value_model(config: Config, path: str, key: str) -> tuple[PreTrainedModel, nn.Linear]:
    """Returns the model at `path` with a head that returns one value per token, and that head. If the folder has no
    head, the head is new and returns 0. Raises ConfigError if the model cannot be used."""
    options = {"num_labels": 1, "ignore_mismatched_sizes": True}
    model, missing = _load(AutoModelForTokenClassification, config, path, key, new=HEADS, **options)
    head = next((module for name in HEADS if (module := getattr(model, name, None)) is not None), None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ConfigError(f"{key} = {path!r}: {type(model).__name__} has no linear head with one output for values")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in head.parameters():
            if names[id(parameter)] in missing:
                getattr(parameter, "ds_tensor", parameter).zero_()
    return model, head


def _load(
    kind: Any, config: Config, path: str, key: str, *, new: tuple[str, ...] = (), **options: Any
) -> tuple[PreTrainedModel, set[str]]:
    """Returns the model, and the names of the parameters missing in the folder, which are all of the modules `new`. All
    ranks call it."""
    disable_progress_bar()
    named = f"{key} = {path!r}"
    try:
        files = tensor_files(Path(path))
    except ConfigError as error:
        raise ConfigError(f"{named}: the model cannot be loaded: {error}") from None
    try:
        loaded = None
        if config.learner.zero_stage == 3 and dist.is_initialized():
            loaded = load_partitioned(kind, config, path, files, new=new, **options)
        model, info = loaded or kind.from_pretrained(
            path,
            dtype=getattr(torch, config.model.dtype),
            attn_implementation=PACKED,
            trust_remote_code=config.model.trust_remote_code,
            use_safetensors=True,  # other formats are pickles
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, ImportError, SafetensorError, StrictDataclassError) as error:
        raise ConfigError(f"{named}: the model cannot be loaded: {type(error).__name__}: {error}") from error
    except UNFIT as error:
        raise ConfigError(
            f"{named}: the model cannot be loaded for packed rows ({type(error).__name__}: {error}); {HOW_TO_FIX}"
        ) from error
    check_tied(model, files, named)
    if info["mismatched_keys"]:
        name, *_ = min(info["mismatched_keys"])
        raise ConfigError(
            f"{named}: {name} has another shape than {type(model).__name__} needs; use a causal language "
            "model, a critic, or a reward model with one output"
        )
    missing = set(info["missing_keys"])
    lost = sorted(name for name in missing if name.partition(".")[0] not in new)
    if lost:
        raise ConfigError(
            f"{named}: the folder has no weights for {lost[0]} ({len(lost)} parameters are missing), which would be "
            "random; is it a complete checkpoint of this kind of model? An output layer that is the embedding needs "
            "tie_word_embeddings=true in config.json"
        )
    # A critic has another head than the model that its folder has.
    body = f"{model.base_model_prefix}."
    refuse_unexpected([name for name in info["unexpected_keys"] if not new or name.startswith(body)], named)
    switch_dropout_off(model)
    if config.learner.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, missing


def load_partitioned(
    kind: Any, config: Config, path: str, files: dict[str, Path], *, new: tuple[str, ...], **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]] | None:
    """Returns the model of the folder as an auto class `kind` builds it, with partitioned parameters, and the
    loading info of `from_pretrained`: the names of parameters that the folder lacks, all of them in the modules `new`,
    and of tensors in its `files` that the model lacks. All ranks call it.

    Returns None if the folder's tensors do not have the names and shapes that the model saves; a complete load may
    rename them, and reports errors.
    """
    from asyncrl.learner.distributed import deepspeed  # slow to import, and not needed without ranks

    trusted: dict[str, Any] = {"trust_remote_code": config.model.trust_remote_code}
    settings = AutoConfig.from_pretrained(path, **trusted, **options)
    with torch.device("meta"):
        meta = kind.from_config(settings, **trusted)
    tensors = checkpoint_tensors(meta)
    missing = {tensor.name for tensor in tensors or [] if tensor.name not in files}
    known = tensors is not None and all(name.partition(".")[0] in new for name in missing)
    if tensors is None or not known or not _have_shapes(tensors, files):
        log.warning("every rank loads the complete model, since its folder has tensors of other names", path=path)
        return None
    # Without overrides, DeepSpeed would round the buffers of rotary embeddings to bfloat16.
    partitions = deepspeed.zero.Init(config_dict_or_path=deepspeed_config(config, meta), tensor_overrides=())
    with partitions, set_zero3_state(), no_init_weights():
        model = kind.from_config(
            settings, dtype=getattr(torch, config.model.dtype), attn_implementation=PACKED, **trusted
        )
    model.tie_weights()
    _fill(model, [tensor for tensor in tensors if tensor.name not in missing], files)
    unexpected = unexpected_tensors(meta, tensors, files)
    return model.eval(), {"missing_keys": missing, "mismatched_keys": set(), "unexpected_keys": unexpected}


def refuse_unexpected(names: Iterable[str], what: str) -> None:
    """Raises ConfigError if there are names: those of tensors in a folder that its model has no use for."""
    if extra := sorted(names):
        raise ConfigError(
            f"{what}: the model of config.json has no {extra[0]} ({len(extra)} tensors of the folder would be left "
            "out); correct config.json (the number of layers?), or save the model without these tensors"
        )


def read_other_files(model: PreTrainedModel, folders: Sequence[str]) -> dict[str, bytes]:
    """Returns the contents of the files of the saved model that are not weights, by path in its folder: the model's
    config, and the other files of these folders unchanged, since loading and saving a tokenizer or a generation config
    may change or refuse it. A later folder wins. Raises ConfigError if they cannot be read or written."""
    contents: dict[str, bytes] = {}
    try:
        for folder in map(Path, folders):
            for path in sorted((*folder.glob("*"), *folder.glob("additional_chat_templates/*"))):
                if path.is_file() and not path.name.startswith(".") and not is_weight_file(path.name):
                    contents[str(path.relative_to(folder))] = path.read_bytes()
        config = copy(model.config)
        config.architectures = [type(model).__name__]
        with TemporaryDirectory() as made:
            config.save_pretrained(made)
            contents["config.json"] = (Path(made) / "config.json").read_bytes()
    except (OSError, TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(
            f"{folders[0]}: the model could not be saved after training: {type(error).__name__}: {error}; mend its "
            "config.json or the file that is named"
        ) from error
    return contents


def switch_dropout_off(model: nn.Module) -> None:
    """Sets all dropout and layer-drop rates of the model to 0, as in the policy that sampled the tokens. Many models
    have these rates as float attributes that they pass to functions during training."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)


def hidden_states(
    model: PreTrainedModel, micro: MicroBatch, parallel: SequenceParallel | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the last hidden states [N, size] at the positions `logit_index` of the micro-batch. With `parallel`, only
    those of this rank's tokens, and which of the N they are."""
    layout, options = micro.layout, {}
    computed, rows, local = layout.computed, layout.twins[micro.logit_index], None
    if parallel is not None:
        computed, options = parallel.part(computed), {"parallel": parallel}
        local, rows = parallel.own(rows, len(layout.computed))
    output = model.base_model(
        input_ids=micro.input_ids[computed].unsqueeze(0),
        position_ids=micro.position_ids[computed].unsqueeze(0),
        packing=layout,
        use_cache=False,
        **options,
    )
    return output.last_hidden_state.squeeze(0).index_select(0, rows), local


def read_range(file: Any, name: str, begin: int, end: int) -> Tensor:
    """Returns elements `begin` to before `end` of a flattened tensor of an open safetensors file, read with the rows
    that they are in."""
    view = file.get_slice(name)
    shape = view.get_shape()
    if not shape:
        return file.get_tensor(name).view(1)[begin:end]
    row = math.prod(shape[1:])
    first, last = begin // row, -(-end // row)
    return view[first:last].reshape(-1)[begin - first * row : end - first * row]


def _have_shapes(tensors: list[CheckpointTensor], files: dict[str, Path]) -> bool:
    with ExitStack() as stack:
        opened = {path: stack.enter_context(safe_open(path, "pt")) for path in set(files.values())}
        return all(
            tuple(opened[files[tensor.name]].get_slice(tensor.name).get_shape()) == tensor.shape
            for tensor in tensors
            if tensor.name in files
        )


@torch.no_grad()
def _fill(model: PreTrainedModel, tensors: list[CheckpointTensor], files: dict[str, Path]) -> None:
    parameters: dict[str, Any] = dict(model.named_parameters())
    counts = {name: parameter.ds_numel for name, parameter in parameters.items()}
    with ExitStack() as stack:
        opened = {path: stack.enter_context(safe_open(path, "pt")) for path in set(files.values())}
        for piece in pieces(tensors, counts, stage=3, rank=dist.get_rank(), ranks=dist.get_world_size()):
            part = parameters[piece.tensor.parameter].ds_tensor.view(-1)[piece.at : piece.at + piece.end - piece.begin]
            part.copy_(read_range(opened[files[piece.tensor.name]], piece.tensor.name, piece.begin, piece.end))


def largest_layer(network: nn.Module) -> int:
    """Returns the number of parameters of the network's largest layer: of all modules in lists of modules."""
    layers = [layer for module in network.modules() if isinstance(module, nn.ModuleList) for layer in module]
    sizes = (sum(getattr(p, "ds_numel", p.numel()) for p in layer.parameters()) for layer in layers)
    return max(sizes, default=0)


BUCKET_ELEMENTS = 50_000_000
"""Number of gradients or weights that the ranks exchange at a time."""


def deepspeed_config(config: Config, network: nn.Module) -> dict[str, Any]:
    """Returns DeepSpeed's settings for the network.

    Gradient accumulation ends at the micro-batch that `TrainedModel.backward` marks as last, and `TrainedModel.step`
    clips gradients. In bfloat16, stage 0 runs as stage 1, since DeepSpeed accumulates gradients in float32 only from
    stage 1 on. Ranks also exchange gradients in float32; by default DeepSpeed rounds them to bfloat16 first, even with
    one rank. Stage 3 keeps the weights of two layers gathered, not DeepSpeed's default of 1e9. Optimizer states in host
    memory are updated there by torch's AdamW: DeepSpeed's own would have to be compiled. The config's
    `learner.deepspeed_options` override these settings.
    """
    bfloat16 = config.model.dtype == "bfloat16"
    stage = config.learner.zero_stage
    zero: dict[str, Any] = {
        "stage": max(stage, 1) if bfloat16 else stage,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
        # In stages 1 and 2 DeepSpeed then waits for all streams after backward, also for the weights on their way to
        # the slowest generator.
        "overlap_comm": torch.cuda.is_available() and stage == 3,
    }
    if stage == 3:
        zero["stage3_max_live_parameters"] = zero["stage3_max_reuse_distance"] = 2 * largest_layer(network)
        # Experts that are modules, as in models with their own code, are gathered at once: each rank's tokens visit
        # others, and no rank may wait for another. Those of the library are one module.
        blocks = {type(m) for m in network.modules() if isinstance(getattr(m, "experts", None), nn.ModuleList)}
        if blocks:
            zero["leaf_module"] = {"classes": sorted(f"{block.__module__}.{block.__qualname__}" for block in blocks)}
    host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if config.learner.offload != "none":
        zero["offload_optimizer"] = host
    if config.learner.offload == "all":
        zero["offload_param"] = host
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "bf16": {"enabled": bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
    return overridden(settings, config.learner.deepspeed_options)
