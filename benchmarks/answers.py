"""An environment of one turn, with the reward of the demo."""

from __future__ import annotations

from asyncrl.environments import Environment, Step


class Answers(Environment):
    """The policy's answer is right if it is the ground truth."""

    max_turns, returns_at_once = 1, True

    def step(self, action):  # type: ignore[no-untyped-def]
        return Step(reward=float(action.text == self.task.ground_truth), done=True)


class Lasting(Environment):
    """Eight turns, with an observation after each of them."""

    max_turns, returns_at_once = 9, True

    def reset(self) -> None:
        self.turns = 0

    def step(self, action):  # type: ignore[no-untyped-def]
        self.turns += 1
        return Step("What is the price of the item?", reward=0.5, done=self.turns == 8)
