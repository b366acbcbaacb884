"""Environments of a user that are wrong in one way each; the ground truth of a row says which."""

from __future__ import annotations

import asyncio
import math
import os
import time
from typing import Any

import numpy as np

from asyncrl.environments import Action, Environment, Step


class Odd(Environment):
    """Answers "." unless the ground truth names something else to do in a method, as in "step raise"."""

    def __init__(self, task: Any, *, wait_s: float = 30.0) -> None:
        super().__init__(task)
        self.where, _, self.what = task.ground_truth.partition(" ")
        self.wait_s = wait_s
        if self.where == "init":
            self._do()

    def reset(self) -> Any:
        return self._do() if self.where == "reset" else ""

    def step(self, action: Action) -> Any:
        if self.where == "step":
            return self._do()
        return Step(".", reward=1.0, done=action.turn == 1)

    def reward(self) -> Any:
        return self._do() if self.where == "reward" else {"score": 0.5, "own": 2.0}

    def close(self) -> None:
        if self.where == "close":
            self._do()

    def _do(self) -> Any:
        match self.what:
            case "raise":
                raise KeyError("no such key")
            case "exit":
                raise SystemExit("enough")
            case "cancel":
                raise asyncio.CancelledError
            case "no utf-8":
                raise ValueError("\ud800")
            case "array":
                return np.zeros(2)
            case "huge":
                return Step(".", reward=10**400)
            case "name":
                return Step(".", parts={"x" * 201: 1.0})
            case "kill":
                os._exit(3)
            case "sleep":
                time.sleep(self.wait_s)
                return ""
            case "await":
                return asyncio.sleep(self.wait_s)
            case "deaf":
                return self._deaf()
            case "step nan":
                return Step(".", reward=math.nan)
            case "parts":
                return Step(".", parts={"a": math.inf})
            case "surrogate":
                return "\ud800"
            case "long":
                return "12" * 25_000_000
            case "special":
                return "<eos>"
            case "empty":
                return Step("")
            case _:
                return {"none": None, "number": 3, "bytes": b"x", "nan": math.nan, "text": "a"}[self.what]

    async def _deaf(self) -> None:
        while True:
            try:
                await asyncio.sleep(self.wait_s)
            except asyncio.CancelledError:
                continue


class Quick(Odd):
    """The same without threads."""

    returns_at_once = True


class Remembering(Environment):
    """Keeps all that the policy says in the object, and the last thing in the class."""

    max_turns = 3
    last = ""

    def reset(self) -> None:
        self.said: list[str] = []

    async def step(self, action: Action) -> Step:
        self.said.append(action.text)
        Remembering.last = action.text
        await asyncio.sleep(0.001 * len(self.said))
        is_own = self.said == [self.task.ground_truth] * len(self.said)
        return Step(
            ">", reward=float(is_own), done=len(self.said) == 3, parts={"changed": Remembering.last != action.text}
        )
