"""The plug-in that vLLM calls at start-up, through the entry point group `vllm.general_plugins`."""

from __future__ import annotations

NAME = "asyncrl"
"""Name of the weight transfer engine in `WeightTransferConfig`."""


def register() -> None:
    """Registers the weight transfer engine with vLLM; idempotent."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            NAME, "asyncrl.generator.vllm_backend.weight_transfer", "StagedTransferEngine"
        )
