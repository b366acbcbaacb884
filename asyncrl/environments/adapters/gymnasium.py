"""Environments of Gymnasium, played as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from asyncrl.config.sections import Options
from asyncrl.environments.adapters.answers import need, own_function
from asyncrl.environments.environment import Action, Environment, Step, Task
from asyncrl.environments.table import Named, checked
from asyncrl.errors import ConfigError
from asyncrl.util.text import describe

INSTALL = "gymnasium==1.4.0"
OWN = ("observe", "act")


def load_gymnasium(rest: str, options: Options, python: str | None) -> Named:
    """An environment of Gymnasium by its id, as `gymnasium:FrozenLake-v1`. Options: `observe`, a function from an
    observation to a text; `act`, one from a text to an action; the others are those of `gymnasium.make`."""
    name = f"gymnasium:{rest}"
    gymnasium = need(name, "gymnasium", INSTALL)
    settings = {key: value for key, value in options.items() if key not in OWN}
    try:
        made = gymnasium.make(rest, **settings)
    except Exception as error:  # of the package, and of the environment itself
        raise ConfigError(f"environment.name = {name!r}: cannot be made with {settings}: {describe(error)}") from None
    try:
        for option, space in (("observe", made.observation_space), ("act", made.action_space)):
            if options.get(option) is None and _kind(space) not in ("Discrete", "Text"):
                form = "text" if option == "observe" else "action"
                raise ConfigError(
                    f"environment.name = {name!r}: its {form}s are not made of {space}; Discrete and Text spaces "
                    f"have a form of their own, others need environment.options.NAME.{option}=file.py:function"
                )
    finally:
        made.close()
    members = {"make": staticmethod(lambda: gymnasium.make(rest, **settings))}
    forms = {key: value for key, value in options.items() if key in OWN}
    return checked(name, type(rest, (GymnasiumEnvironment,), members), forms)


class GymnasiumEnvironment(Environment):
    """An action that cannot be read is answered with the rule, and is no step of the environment; the part "unread" of
    the reward counts them."""

    make: ClassVar[Any]
    """Returns an environment of Gymnasium."""

    def __init__(self, task: Task, *, observe: str | None = None, act: str | None = None) -> None:
        super().__init__(task)
        self._env = self.make()
        self._observe: Callable[[Any], Any] = str if observe is None else own_function("observe", observe)
        self._act = self._read if act is None else own_function("act", act)

    @classmethod
    def check_setup(cls, **options: Any) -> None:
        for option in OWN:
            if options.get(option) is not None:
                own_function(option, options[option])

    def reset(self) -> Any:
        observation, _ = self._env.reset(seed=self.task.seed, options=self.task.extra_info.get("options"))
        return self._observe(observation)

    def step(self, action: Action) -> Step:
        try:
            chosen = self._act(action.message.get("content", action.text))
        except ValueError as error:
            return Step(str(error), parts={"unread": 1.0})
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        done = bool(terminated or truncated)
        return Step(self._observe(observation), reward=float(reward), done=done, parts={"unread": 0.0})

    def close(self) -> None:
        self._env.close()

    def _read(self, text: str) -> Any:
        """The action that a text names. Raises ValueError with the rule."""
        space, text = self._env.action_space, text.strip()
        if _kind(space) == "Text":
            if not space.contains(text):
                raise ValueError(
                    f"Answer with {space.min_length} to {space.max_length} of the characters {space.characters}"
                )
            return text
        first, last = int(space.start), int(space.start + space.n - 1)
        if not text.lstrip("-").isdecimal() or not first <= int(text) <= last:
            raise ValueError(f"Answer with a number from {first} to {last}")
        return int(text)


def _kind(space: Any) -> str:
    return type(space).__name__
