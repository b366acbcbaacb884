"""The panel of the live view: its four questions, on small and large terminals."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from asyncrl.observe.live import LiveView, RewardHistory, ShownSample
from tests.observe.test_observe import COLLAPSE, STATUS

METRICS = {
    "learner/entropy": 0.7, "learner/grad_norm": 0.3, "completion/tokens": 12.25, "staleness/in_flight": 0.25,
    "staleness/in_queue": 1.25, "group/generate_s": 2.5, "group/queue_s": 0.5, "group/train_s": 0.125,
    "time/elapsed_s": 75.0, "goodput/total": 0.36, "goodput/engine": 0.9, "goodput/admitted": 1.0,
    "goodput/signal": 0.4, "goodput/trained": 1.0, "goodput/bare_tokens_per_s": 9000.0,
}  # fmt: skip
EVALUATION = {"last": {"version": 2, "reward": 0.25}, "running": [{"version": 4, "done": 3, "prompts": 9}]}
SAMPLES = [
    ShownSample("step 3, best: reward 1, staleness 2, 4 tokens", "12=" * 40, "7" * 200),
    ShownSample("step 3, worst: reward 0, staleness 1, 2 tokens", "[red]1+1=[/red]", "\n"),
]
QUESTIONS = ("Is it learning?", "How fast?", "What holds it back?", "How off-policy?")


def panel(width: int, height: int, *, restarts: int = 0, **status: Any) -> list[str]:
    """The lines of the panel after three steps, as they are on the screen."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    view = LiveView(console, run="demo [1]", steps=300, max_staleness=4, rewards=[0.1, 0.2])
    view.judge(
        "generator-bound: the learner waited 61% of the time; another generator would gain about +96% (simulated)"
    )
    view.show_samples(SAMPLES)
    for step, reward in ((1, 0.3), (2, 0.4), (3, 0.5)):
        shown = STATUS | {"metrics": METRICS, "step": step, "reward": reward, "eval": EVALUATION} | status
        view.update(shown, restarts=restarts)
    assert view._live is not None
    recorder = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    recorder.print(view._live.renderable)
    return recorder.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_episodes_and_their_waits_are_shown_where_there_is_an_environment() -> None:
    more = {
        "environment/live_episodes": 54.0, "environment/waiting_episodes": 23.0, "environment/turns": 2.0,
        "environment/wait_s/p50": 0.1, "environment/wait_s/p95": 1.125,
    }  # fmt: skip
    generator = STATUS["generators"]["0"] | {"environments": 0.19, "live_episodes": 54, "waiting_episodes": 23}
    shown = {"metrics": METRICS | more, "generators": {"0": generator}, "generator_environments": 0.19}
    text = "\n".join(panel(200, 50, **shown))
    assert "in environments 19%" in text
    assert (
        "54 episodes in progress, 23 wait for environments; 2.0 turns, each episode waits 0.1 s (95 %: 1.1 s)" in text
    )
    assert any(line.split()[-4:-1] == ["19%", "54", "23"] for line in text.splitlines())
    without = "\n".join(panel(200, 50))
    assert "environments" not in without and "episodes" not in without


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (60, 20), (120, 30)])
def test_the_questions_are_answered_and_fit_the_terminal(width: int, height: int) -> None:
    lines = panel(width, height)
    text = "\n".join(lines)
    assert len(lines) < height and max(map(len, lines)) <= width
    for part in (
        *QUESTIONS,
        "demo [1]",
        "0.500",
        "from 0.100",
        "1,234 trained tokens/s",
        "1.50 (max 2 of 4)",
        "generator-bound",
        "1 min 15 s",
        "goodput 36%",
        "signal",
    ):
        assert part in text, part
    assert "{" not in text, "no raw values"


def test_a_small_terminal_shows_samples_before_tables() -> None:
    small, large = "\n".join(panel(80, 21)), "\n".join(panel(200, 50))
    assert "What does it write?" in small and "'[red]1+1=[/red]' → '\\n'" in small
    assert "entropy" not in small and "entropy" in large
    for part in ("0.25 in flight, 1.25 in the queue", "generated 2.5 s", "99"):
        assert part in large, part
    assert "refunded 7 zero_variance" in large and "evaluation 0.250 (version 2), version 4: 3 of 9" in large
    assert "▁▃▄▆█" in large
    assert "goodput 36% = engine 90% x admitted 100% x signal 40% x trained 100%" in large
    assert "goodput 36%, signal only 40%" in small


def test_what_goes_wrong_is_told_on_every_terminal() -> None:
    for height in (20, 50):
        lines = panel(80, height, restarts=4, generators_wanted=3)
        assert any("! 1 of 3 generators, restarts 4" in line for line in lines)


def test_a_collapse_takes_the_place_of_the_verdict_on_every_terminal() -> None:
    for height in (20, 50):
        text = " ".join(line.strip("│ ") for line in panel(80, height, collapse=COLLAPSE))
        assert "! collapsed at step 12: the policy [x] was far. The updates are too large" in text
        assert "generator-bound" not in text
    recovered = "\n".join(panel(80, 24, collapse=COLLAPSE | {"active": False}))
    assert "collapsed" not in recovered and "generator-bound" in recovered


def test_a_panel_without_steps_or_metrics_is_drawn() -> None:
    lines = panel(80, 24, metrics={}, reward=None, generators={}, eval={"last": None, "running": []})
    assert any("reward -" in line for line in lines) and not any("nan" in line for line in lines)
    assert not any("goodput" in line for line in lines), "unknown and not 0"


def test_the_history_knows_how_long_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter(range(0, 10_000, 2))
    monkeypatch.setattr("asyncrl.observe.live.time.monotonic", lambda: float(next(now_s)))
    history = RewardHistory()
    for step in range(1, 100):
        history.add(step, 1.0)
        history.add(step, 5.0)
    assert set(history.rewards) == {1.0}
    assert history.step_s == 2.0
    history.add(3, 1.0)
    assert history.step_s is None, "a run that was resumed"
