"""The samples of the live view: the latest recorded ones, once each, safe for a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from rich.console import Console

from asyncrl.config.load import load_config
from asyncrl.observe.live import LiveView, ShownSample
from asyncrl.observe.sample_watch import ShownSamples
from asyncrl.observe.samples import SampleBook
from asyncrl.types import Group, Lease, Prompt
from tests.helpers.replay import make_group
from tests.helpers.reward_pool import TOKENS, save_tokenizer


def group() -> Group:
    prompt = Prompt(0, np.array([TOKENS.index(character) for character in "12="], dtype=np.int32), "1", "sums")
    made = make_group(Lease(0, 0, prompt), 0, rewards=(0.25, 1.0), completion_tokens=(2, 4))
    for member in made.trajectories:
        member.tokens[:3] = prompt.tokens
        member.tokens[3:] = TOKENS.index("7")
    return made


def test_the_latest_recorded_step_is_shown_once(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    config = load_config(None, {"model.path": str(tmp_path), "data.train": "train.parquet", "observe.samples": 1})
    shown = ShownSamples(tmp_path, config)
    assert shown.update() == []
    SampleBook(tmp_path).record(3, [group()])
    (sample,) = shown.update()
    assert sample.line == "step 3, best: reward 1, staleness 2, 4 tokens  '12=' -> '7777'"
    assert shown.update() == []
    off = config.model_copy(update={"observe": config.observe.model_copy(update={"samples": 0})})
    assert ShownSamples(tmp_path, off).update() == []


def test_samples_without_a_tokenizer_are_not_shown_and_the_run_goes_on(tmp_path: Path) -> None:
    config = load_config(None, {"model.path": str(tmp_path), "data.train": "train.parquet"})
    SampleBook(tmp_path).record(3, [group()])
    assert ShownSamples(tmp_path, config).update() == []


def test_the_view_prints_them_without_a_terminal_and_keeps_them_in_its_panel() -> None:
    output = io.StringIO()
    view = LiveView(Console(file=output), run="r", steps=9, max_staleness=2)
    view.show_samples([ShownSample("one [bold]", "1+", "2")])
    view.show_samples([ShownSample("too early", "", "")])
    view.show_samples([])
    assert output.getvalue() == "  one [bold]  '1+' -> '2'\n"
