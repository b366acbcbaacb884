"""Checks in the first steps that engine and learner compute the same log-probs, on tokens that both scored with the
same weights. Neither the config nor the weights reveal a difference in the computation."""

from __future__ import annotations

import structlog
import torch
from torch import Tensor

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.distributed import Ranks

log = structlog.get_logger()

LIMITS = {"float32": 0.02, "bfloat16": 0.25}
"""Upper limit of the mean absolute difference of log-probs, in nats. Rounding causes at most 2e-5 in float32 on a CPU,
and 1e-2 on GPUs that round the factors of products. In bfloat16 it causes 0.01 to 0.08, for models with weights far
larger than those of trained models. An engine that computes something else differs by 0.1 to 5."""
ENOUGH_TOKENS = 32
"""Minimum number of compared tokens. In bfloat16 a single token differs by 1 or more if a router chooses another
expert."""
ROUNDING_OPTIONS = ("quantization", "kv_cache_dtype")
"""Keys of `generator.engine_options` that make the engine compute with a lower precision than `model.dtype`."""


class MismatchCheck:
    """Compares the learner's log-probs with the engine's, once in the life of a process.

    Counts only trajectories whose tokens were all sampled by the learner's own version, so that each token's context
    was also computed with that version's weights. Both log-probs are those of the complete distribution at the sampling
    temperature.
    """

    def __init__(self, config: Config, ranks: Ranks, model_type: str) -> None:
        self._ranks = ranks
        settings = config.generator
        self._who = f"model.path = {config.model.path!r}: the engine computes a model of type {model_type}"
        self._dtype = config.model.dtype
        # A temperature below 1 magnifies differences of logits.
        self._limit = LIMITS[self._dtype] / min(settings.temperature, 1.0)
        self._rounds = [
            f"{name}={value}"
            for name in ROUNDING_OPTIONS
            if (value := settings.engine_options.get(name)) not in (None, "auto")
        ]
        self._sums = torch.zeros(2, dtype=torch.float64)
        """Sum of the absolute differences, and number of tokens."""

    def add(self, micro: MicroBatch, logprobs: Tensor, *, version: int) -> None:
        """Adds a micro-batch to the sums, with its `logprobs` [N] under the weights of `version`."""
        stale = torch.zeros(len(micro.names), device=micro.seq.device)
        stale.index_add_(0, micro.seq, (micro.versions != version).float())
        differences = (logprobs - micro.behavior_logprobs).abs().double()
        compared = (stale[micro.seq] == 0) & differences.isfinite()
        sums = torch.stack([torch.where(compared, differences, 0.0).sum(), compared.sum().double()])
        self._sums = self._sums.to(sums.device) + sums  # not read back here: that would wait for the GPU

    def conclude(self, step: int) -> bool:
        """Returns True if enough tokens were counted up to this step, the same on all ranks. All ranks call it.

        Raises ConfigError if engine and learner differ by more than rounding explains. If the engine is configured to
        round more than the learner, a warning is logged instead.
        """
        total, tokens = self._ranks.of_data.gather(self._sums).sum(dim=0).tolist()
        if tokens < ENOUGH_TOKENS:
            return False
        mean = total / tokens
        first = self._ranks.rank == 0
        if mean <= self._limit:
            if first:
                log.info("engine and learner agree", mean_difference_nats=mean, tokens=int(tokens), step=step)
            return True
        text = (
            f"{self._who} differently from the learner: log-probs of {tokens:.0f} tokens with the same weights differ "
            f"by {mean:.2g} nats on average, but rounding in {self._dtype} explains at most {self._limit:.2g}"
        )
        if not self._rounds:
            raise ConfigError(
                f"{text}. Every importance ratio would be wrong; use a family for which engine and learner agree "
                "(docs/models.md has a table)"
            )
        if first:
            log.warning(
                f"{text}; expected with generator.engine_options {', '.join(self._rounds)}, and left to the correction "
                "(correction/mismatch_kl, correction/ess)"
            )
        return True
