"""Guess a number: the policy hears whether its guess is too low or too high."""

from __future__ import annotations

from typing import Any

from asyncrl.environments.environment import Action, Environment, Step


class GuessNumber(Environment):
    """The number of the ground truth is to be guessed within five turns. The answers to a guess are ">" (the number is
    larger), "<" (smaller) and "?" (this was no number)."""

    max_turns = 5
    returns_at_once = True

    def reset(self) -> None:
        self.secret = int(self.task.ground_truth)

    def step(self, action: Action) -> Any:
        if not action.text.isdecimal():
            return Step("?", parts={"no_number": 1.0})
        guess = int(action.text)
        if guess == self.secret:
            return Step(reward=1.0, done=True)
        return "<" if self.secret < guess else ">"
