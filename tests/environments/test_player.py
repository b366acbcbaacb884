"""One episode, played in this process: its turns, its ends, and what wrong environments do to it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from bad_environments import Odd, Quick

from asyncrl.environments import Action, Environment, Step
from asyncrl.environments.builtin import Calculator, GuessNumber
from asyncrl.environments.dialogue.dialogue import MARK, Dialogue
from asyncrl.environments.episode import Limits, PolicyTurn
from asyncrl.environments.player import Player
from asyncrl.environments.table import Named
from asyncrl.wire.service_messages import EpisodeEnded, NextTurn
from tests.helpers.played import play_row
from tests.helpers.reward_pool import TOKENS, save_tokenizer, tokens

EXTRA = "?<>.[]*"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path, extra=EXTRA)
    return path


@dataclass
class Policy:
    """Says the texts in turn, and remembers what it read before each."""

    texts: Iterator[str]
    dialogue: Dialogue
    read: list[str] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    truncated: bool = False

    def say(self, player: Player, wish: NextTurn, observation: list[int]) -> None:
        self.read.append(self.dialogue.text_of(observation))
        self.limits.append(wish.max_tokens)
        said = encoded(next(self.texts))[: wish.max_tokens]
        player.receive(wish.branch, PolicyTurn(said, "truncated" if self.truncated else "completed"))


def encoded(text: str) -> list[int]:
    names = [*TOKENS, *EXTRA]
    return [*(names.index(character) for character in text), names.index("<eos>")]


def play(
    folder: Path,
    kind: type[Environment],
    truth: str,
    *said: str,
    window: int = 64,
    max_observation_tokens: int = 20,
    step_timeout_s: float = 5.0,
    timeout_s: float = 10.0,
    truncated: bool = False,
    **options: object,
) -> tuple[EpisodeEnded, Policy]:
    dialogue = Dialogue(str(folder), trust_remote_code=False, max_observation_tokens=max_observation_tokens)
    policy = Policy(iter(said), dialogue, truncated=truncated)
    ended = play_row(
        Named(kind, dict(options)),
        dialogue,
        policy.say,
        tokens=tokens("12+07=")[:-1],
        limits=Limits(window, 10, 3, timeout_s, step_timeout_s),
        ground_truth=truth,
    )
    return ended, policy


def test_guesses_are_answered_until_the_number_is_hit(folder: Path) -> None:
    ended, policy = play(folder, GuessNumber, "07", "12", "1+", "03", "07")
    assert policy.read == ["", "<", "?", ">"]
    assert (ended.status, ended.ended, ended.reward) == ("completed", "done", 1.0)
    assert ended.turn_rewards == [0.0, 0.0, 0.0, 1.0] and ended.parts == {"no_number": 1.0}
    assert (ended.error, ended.messages) == ("", b"") and ended.environment_s > 0


def test_an_episode_is_cut_after_its_turns(folder: Path) -> None:
    ended, policy = play(folder, GuessNumber, "07", *["12"] * 5)
    assert (ended.status, ended.ended, ended.reward) == ("truncated", "max_turns", 0.0)
    assert len(policy.read) == GuessNumber.max_turns == 5
    ended, policy = play(folder, Odd, "step text", *["1"] * 3)
    assert len(policy.read) == 3, "environment.max_turns where the environment has no number of its own"
    assert ended.ended == "max_turns"


def test_the_calculator_answers_calls(folder: Path) -> None:
    ended, policy = play(folder, Calculator, "1702", "?37*46", "1702")
    assert policy.read == ["", ">1702"] and (ended.reward, ended.parts) == (1.0, {"calls": 1.0})
    ended, policy = play(folder, Calculator, "1702", "?37*46", "1702", broken=True)
    assert policy.read == ["", ">????"]
    ended, _ = play(folder, Calculator, "1702", "1703")
    assert (ended.ended, ended.reward, ended.parts) == ("done", 0.0, {"calls": 0.0})
    began_s = time.monotonic()
    ended, _ = play(folder, Calculator, "1702", "?37*46", "1702", latency_s=0.3)
    assert time.monotonic() - began_s >= 0.3 and ended.environment_s >= 0.3


@pytest.mark.parametrize("kind", [Odd, Quick])
def test_the_reward_is_the_sum_over_turns_and_that_of_the_episode(folder: Path, kind: type[Environment]) -> None:
    ended, policy = play(folder, kind, "", "1", "2")
    assert policy.read == ["", "."] and policy.limits == [10, 10]
    assert (ended.status, ended.reward, ended.parts) == ("completed", 2.5, {"own": 2.0})


def test_the_window_ends_an_episode_before_a_turn_that_does_not_fit(folder: Path) -> None:
    ended, policy = play(folder, Odd, "step text", "1", "1", window=11)
    assert policy.limits == [5, 2], "6 tokens of the prompt, 2 of a turn, 1 of the answer"
    assert (ended.status, ended.ended) == ("truncated", "window")
    ended, policy = play(folder, Odd, "reset text", "1", window=7)
    assert (ended.status, ended.ended, policy.read) == ("failed", "overlong", [])
    assert ended.error == "Odd: 7 tokens before the first turn, the window has 7"


def test_an_episode_whose_last_turn_was_cut_is_truncated(folder: Path) -> None:
    ended, _ = play(folder, Odd, "", "1", "2", truncated=True)
    assert (ended.status, ended.ended) == ("truncated", "done")


@pytest.mark.parametrize(
    ("truth", "error"),
    [
        ("init raise", "Odd.__init__ raised KeyError: 'no such key'"),
        ("reset raise", "Odd.reset raised KeyError: 'no such key'"),
        ("step raise", "Odd.step raised KeyError: 'no such key'"),
        ("step exit", "Odd.step raised SystemExit: enough"),
        ("step cancel", "Odd.step raised CancelledError"),
        ("step no utf-8", "Odd.step raised ValueError: \\ud800"),
        ("reset array", "Odd: an answer cannot be read: ValueError: The truth value of an array"),
        ("reward array", "Odd: an answer cannot be read: TypeError: only "),
        ("step huge", "Odd: an answer cannot be read: OverflowError: int too large"),
        ("step name", "Odd.step: part 'xxx"),
        ("reward raise", "Odd.reward raised KeyError: 'no such key'"),
        ("reset number", "Odd.reset said 3 (int), which is no text"),
        ("reset surrogate", "Odd.reset said what is no valid text: 'utf-8' codec can't encode character '\\ud800'"),
        ("step none", "Odd.step said nothing, and the episode is not done"),
        ("step empty", "Odd.step said nothing, and the episode is not done"),
        ("step number", "Odd.step returned 3 (int), which is no Step and no text"),
        ("step bytes", "Odd.step returned b'x' (bytes), which is no Step and no text"),
        ("step step nan", "Odd.step: reward is nan (float), not a finite number"),
        ("step parts", "Odd.step: part 'a' is inf (float), not a finite number"),
        ("reward none", "Odd.reward is None (NoneType), not a finite number"),
        ("reward nan", "Odd.reward is nan (float), not a finite number"),
        ("reward text", "Odd.reward is 'a' (str), not a finite number"),
    ],
)
def test_a_wrong_environment_fails_its_episode(folder: Path, truth: str, error: str) -> None:
    ended, _ = play(folder, Odd, truth, "1", "1")
    assert (ended.status, ended.ended, ended.reward) == ("failed", "environment", 0.0)
    assert ended.error.startswith(error)
    quick, _ = play(folder, Quick, truth, "1", "1")
    assert quick.error.startswith(error.replace("Odd", "Quick"))


@pytest.mark.parametrize(
    "truth", ["init sleep", "reset sleep", "step sleep", "step await", "step deaf", "reward sleep"]
)
def test_a_call_that_takes_too_long_fails_its_episode(folder: Path, truth: str) -> None:
    began_s = time.monotonic()
    ended, _ = play(folder, Odd, truth, "1", "1", step_timeout_s=0.2, wait_s=2.0)
    method = {"init": "__init__"}.get(truth.split()[0], truth.split()[0])
    assert ended.error == f"Odd.{method} took longer than environment.step_timeout_s = 0.2 s"
    assert (ended.status, ended.ended) == ("failed", "timeout")
    ended, _ = play(folder, Odd, truth, "1", "1", timeout_s=0.2, wait_s=2.0)
    assert ended.error == f"Odd.{method} took longer than environment.timeout_s = 0.2 s"
    assert time.monotonic() - began_s < 10.0


def test_names_of_parts_are_bounded_and_texts(folder: Path) -> None:
    class Named(Odd):
        def step(self, action: Action) -> Step:
            names = range(200 * action.turn, 200 * action.turn + int(self.task.ground_truth))
            return Step(".", parts=dict.fromkeys(names, 1.0), done=action.turn == 1)

    ended, _ = play(folder, Named, "2", "1", "1")
    assert ended.parts == {**dict.fromkeys(("0", "1", "200", "201"), 1.0), "own": 2.0}
    ended, _ = play(folder, Named, "200", "1", "1")
    assert ended.ended == "environment" and "not at most 256 numbers" in ended.error


def test_an_environment_is_closed_after_the_time_of_its_episode(folder: Path) -> None:
    closed: list[float] = []

    class Closing(Odd):
        def close(self) -> None:
            closed.append(time.monotonic())

    ended, _ = play(folder, Closing, "step await", "1", timeout_s=0.2, wait_s=2.0)
    assert ended.ended == "timeout" and len(closed) == 1


def test_an_environment_that_is_not_closed_keeps_its_reward(folder: Path) -> None:
    ended, _ = play(folder, Odd, "close raise", "1", "2")
    assert (ended.status, ended.reward) == ("completed", 2.5)


def test_special_tokens_in_an_observation_stay_text(folder: Path) -> None:
    dialogue = Dialogue(str(folder), trust_remote_code=False, max_observation_tokens=20)
    special = TOKENS.index("<eos>")
    assert special not in dialogue.encode("1<eos>2")
    assert len(dialogue.encode("<eos>")) == 5, "one token for each character"
    ended, _ = play(folder, Odd, "reset special", "1", "2")
    assert ended.status == "completed"


def test_a_long_observation_keeps_its_two_ends(folder: Path) -> None:
    dialogue = Dialogue(str(folder), trust_remote_code=False, max_observation_tokens=20)
    text = "1" * 30 + "2" * 30
    shown = dialogue.text_of(dialogue.encode(text))
    assert len(dialogue.encode(text)) == 20 and shown.startswith("1111111") and shown.endswith("222222")
    assert len(dialogue.encode(MARK)) == 7
    began_s = time.monotonic()
    ended, policy = play(folder, Odd, "reset long", "1", "2")
    assert time.monotonic() - began_s < 5.0 and ended.status == "completed"
    assert policy.read[0].startswith("1212") and policy.read[0].endswith("1212")
