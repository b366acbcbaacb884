"""What vLLM calls at start-up, through the entry point group `vllm.general_plugins`."""

from __future__ import annotations

NAME = "asyncrl"
"""Of the weight transfer engine, as `WeightTransferConfig` names it."""


def register() -> None:
    """Makes the weight transfer engine known to vLLM; may be called many times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            NAME, "asyncrl.generator.vllm_backend.weight_transfer", "StagedTransferEngine"
        )
