"""Environments of SkyRL-Gym: texts in, messages out."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from asyncrl.config.sections import Options
from asyncrl.environments.adapters.answers import need
from asyncrl.environments.environment import Action, Environment, Message, Say, Step, Task
from asyncrl.environments.table import Named, checked
from asyncrl.errors import ConfigError
from asyncrl.util.text import did_you_mean
from asyncrl.util.user_code import resolve

INSTALL = "skyrl-gym==0.4.0"


def load_skyrl(rest: str, options: Options, python: str | None) -> Named:
    """An environment of SkyRL-Gym, as `skyrl:gsm8k`, or a custom class, as `skyrl:FILE.py:CLASS`. Option
    `max_turns`; the others are its `env_config`."""
    name = f"skyrl:{rest}"
    gym, omegaconf = need(name, "skyrl_gym", INSTALL), need(name, "omegaconf", INSTALL)
    if ":" in rest:
        entry = resolve("environment.name", rest, {})
        spec = need(name, "skyrl_gym.envs.registration", INSTALL).EnvSpec(rest, entry)
    elif rest in gym.registry:
        spec = gym.registry[rest]
    else:
        raise ConfigError(
            f"environment.name = {name!r}: skyrl_gym has no {rest!r}{did_you_mean(rest, gym.registry)} (it has "
            f"{', '.join(sorted(gym.registry))}); a class of your own is skyrl:file.py:Class"
        )
    turns = options.get("max_turns")
    settings = omegaconf.OmegaConf.create({key: value for key, value in options.items() if key != "max_turns"})
    made = staticmethod(lambda extras: gym.make(spec, env_config=settings, extras=extras))  # type: ignore[misc]
    kind = type(rest, (SkyRLEnvironment,), {"make": made, "max_turns": turns})
    return checked(name, kind, {"max_turns": turns})


class SkyRLEnvironment(Environment):
    """Episodes keep the policy's text as it was sampled, whatever `postprocessed_action` is; the part
    "postprocessed" of the reward counts the turns in which it is something else."""

    make: ClassVar[Any]
    """Returns an environment of SkyRL-Gym, from its extras."""

    def __init__(self, task: Task, *, max_turns: int | None = None) -> None:
        super().__init__(task)
        extras = {"reward_spec": {"method": "rule", "ground_truth": task.ground_truth}, **copy.deepcopy(task.columns)}
        extras |= {"data_source": task.data_source, "extra_info": copy.deepcopy(dict(task.extra_info))}
        if max_turns is not None:
            extras["max_turns"] = max_turns
        self._env = self.make(extras)

    def reset(self) -> Any:
        prompt = self.task.prompt
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        begun, _ = self._env.init(copy.deepcopy(messages))
        if begun[: len(messages)] != messages:
            raise ValueError("init has changed the prompt, whose tokens are fixed; it may only add messages behind it")
        return self._said(begun[len(messages) :])

    def step(self, action: Action) -> Step:
        output = self._env.step(action.text)
        changed = output.get("postprocessed_action")
        parts = {"postprocessed": float(changed is not None and changed != action.text)}
        said = self._said(output["observations"])
        return Step(said, reward=float(output["reward"]), done=bool(output["done"]), parts=parts)

    def reward(self) -> dict[str, float]:
        numbers = {name: value for name, value in self._env.get_metrics().items() if isinstance(value, int | float)}
        return {**numbers, "score": 0.0}

    def close(self) -> None:
        self._env.close()

    def _said(self, messages: list[Message]) -> Say:
        """The messages; without a chat template their texts."""
        if isinstance(self.task.prompt, str):
            return "".join(message["content"] for message in messages)
        return messages
