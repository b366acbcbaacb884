"""The facts that guests and the run must have in common, and the replay role's part in welcoming guests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.packages import package_versions
from asyncrl.replay.guest_logs import GuestLogs
from asyncrl.replay.guests import Reception
from asyncrl.util.files import read_json, read_tensor_descriptions
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.guests import Guests

GUESTS = "guests.json"
"""File with the table of guests, in the run folder."""
DIGEST_CHARACTERS = 16


def model_facts(model: str) -> dict[str, str]:
    """Returns digests of a model's configuration, and of the names, dtypes and shapes of its weights. The weights
    themselves come from the learner. Raises ConfigError if the model cannot be read."""
    folder = Path(model)
    files = sorted(folder.glob("*.safetensors"))
    tensors = {
        name: [tensor["dtype"], tensor["shape"]]
        for file in files
        for name, tensor in read_tensor_descriptions(file).items()
    }
    if not tensors:
        raise ConfigError(f"model {model}: no weights in *.safetensors files; give the run's model by --model")
    config = read_json(folder / "config.json")
    return {"config.json of the model": _digest(config), "tensors of the model": _digest(tensors)}


def reception_of(
    config: Config, run_dir: Path, endpoints: Endpoints, *, prompt_tokens: int, greedy_baseline: bool
) -> Reception | None:
    """Returns what the replay queue needs to welcome guests; None in a run that other machines do not reach."""
    if not endpoints.keys:
        return None
    return Reception(
        Guests(run_dir / GUESTS),
        config,
        endpoints.run_id,
        prompt_tokens=prompt_tokens,
        greedy_baseline=greedy_baseline,
        reward_model=bool(endpoints.reward_model),
        read_facts=lambda model: package_versions() | model_facts(model),
        logs=GuestLogs(run_dir / "logs"),
    )


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]
