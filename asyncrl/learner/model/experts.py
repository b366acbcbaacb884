"""Experts that are modules of their own, in models sharded by ZeRO stage 3."""

from __future__ import annotations

from torch import nn

from asyncrl.learner.model.deepspeed_import import deepspeed


def gather_experts_together(model: nn.Module) -> None:
    """Makes DeepSpeed gather the weights of a layer's experts at once. Otherwise it gathers those of an expert when a
    token visits it, on all ranks, and a rank without such a token would be waited for. The experts of transformers are
    one module with stacked weights, and need nothing."""
    blocks = {type(one) for one in model.modules() if any(isinstance(m, nn.ModuleList) and name == "experts"
                                                         for name, m in one.named_children())}  # fmt: skip
    if blocks:
        deepspeed.utils.set_z3_leaf_modules(model, sorted(blocks, key=lambda one: one.__name__))
