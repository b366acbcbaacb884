"""A dataset, a sampler and a filter of the user's own."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.data import rows as parquet
from asyncrl.data.cursor import PromptCursor
from asyncrl.data.prompts import eval_prompts
from asyncrl.data.rows import PromptTable, check_dataset, count_sources
from asyncrl.errors import ConfigError, DataError
from asyncrl.launch.checks import check_data_and_rewards
from tests.data.conftest import row

Write = Callable[..., Config]
OWN = str(Path(__file__).with_name("data_parts.py"))


@pytest.fixture
def own(tmp_path: Path, tokenizer_folder: Path) -> Write:
    """A config of lines 0 to 9 with parts of data_parts.py."""
    for name, count in (("train", 10), ("eval", 3)):
        (tmp_path / name).write_text("".join(f"{number}\n" for number in range(count)))

    def make(*, options: dict[str, Any] | None = None, settings: dict[str, Any] | None = None, **parts: str) -> Config:
        custom = {part: f"{OWN}:{name}" for part, name in parts.items()} | ({"options": options} if options else {})
        files = {"data.train": str(tmp_path / "train"), "data.eval": str(tmp_path / "eval"), "data.custom": custom}
        return load_config(None, {"model.path": str(tokenizer_folder), "rewards": "exact", **files, **(settings or {})})

    return make


def rows(config: Config, count: int) -> list[int]:
    return [prompt.row for prompt in islice(PromptCursor(config, limit_tokens=10), count)]


def test_rows_of_a_dataset_class_are_trained_and_evaluated(own: Write) -> None:
    config = own(dataset="Lines", options={"dataset": {"limit": 8}})
    assert check_dataset(config) == 8
    assert count_sources(config) == {"Lines": 11}
    prompt = PromptTable(config)[5]
    assert (prompt["prompt"], prompt["ground_truth"], prompt["data_source"]) == ("5", "5", "Lines")
    assert (prompt["extra_info"], prompt["columns"], prompt["where"]) == ({"level": 1}, {"n": 5}, f"{OWN}:Lines, row 5")
    assert sorted(rows(config, 8)) == list(range(8))
    assert [one.ground_truth for one in eval_prompts(config, limit_tokens=10)] == ["0", "1", "2"]


def test_a_function_that_returns_a_list_is_a_dataset(own: Write) -> None:
    config = own(dataset="listed")
    assert check_dataset(config) == 6 and count_sources(config) == {"own": 12}
    output = io.StringIO()
    assert check_data_and_rewards(config, Console(file=output))[1] == 6
    assert f"importing {OWN} ..." in output.getvalue().replace("\n", "")


def test_rows_are_ordered_by_a_sampler(own: Write) -> None:
    config = own(dataset="Lines", sampler="Stages", options={"sampler": {"first": 2}})
    check_dataset(config)
    found = rows(config, 22)
    assert sorted(found[:2]) == [0, 1] and sorted(found[2:12]) == sorted(found[12:]) == list(range(10))
    assert found[2:12] != found[12:]


def test_rows_are_filtered_counted_and_not_evaluated_by_the_filter(own: Write) -> None:
    config = own(dataset="Lines", filter="above", options={"filter": {"level": 2}})
    check_dataset(config)
    cursor = PromptCursor(config, limit_tokens=10)
    assert {prompt.row for prompt in islice(cursor, 9)} == {3, 7}
    assert (cursor.filtered_rows, cursor.skipped_rows) == (8, 0)
    assert cursor.prompt(0).ground_truth == "0", "a journaled lease of any row can be read"
    assert len(eval_prompts(config, limit_tokens=10)) == 3


def test_files_with_a_filter_and_a_sampler(dataset: Write) -> None:
    custom = {"sampler": f"{OWN}:Stages", "filter": f"{OWN}:even"}
    config = dataset([row(i) for i in range(4)], [row(i) for i in range(4)], data__custom=custom)
    assert check_dataset(config) == 8
    found = rows(config, 6)
    assert sorted(found[:2]) == [0, 2] and sorted(found[2:6]) == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("part", "name", "message"),
    [
        ("dataset", "Missing", r"has no 'Missing'"),
        ("dataset", "nothing", r"makes a NoneType without __len__ and __getitem__; it must make rows by number"),
        ("dataset", "empty", r"data.train = '.*train': there is no row in it"),
        ("dataset", "OfVerl", r"raised TypeError: .* missing .* 'data_config'"),
        ("dataset", "Broken", r"Broken, row 3: raised KeyError: 'no such line'"),
        ("dataset", "without_truth", r"without_truth, row 0: 'reward_model.ground_truth' is empty"),
        ("dataset", "numbers_for_prompts", r"row 0: 'prompt': is of type int; it must be a string or a list of mess"),
        ("sampler", "Forgetful", r"does not resume: after 4 rows it yields \[.*\], but after load_state_dict"),
        ("sampler", "Wild", r"yields 99; it must yield numbers of rows, 0 to 9"),
        ("sampler", "Silent", r"yields no row in an epoch"),
        ("sampler", "Curriculum", r"has update\(\), with which verl's AbstractCurriculumSampler"),
        ("sampler", "OfVerl", r"raised TypeError: .* missing .* 'data_config'"),
        ("sampler", "Huge", r"state_dict\(\) has 2,097,1\d\d bytes, at most 1,048,576 are allowed"),
        ("sampler", "Generators", r"state_dict\(\) cannot be stored: it has a Random"),
        ("sampler", "Stateless", r"has no state_dict, load_state_dict; without them a run cannot be resumed"),
        ("filter", "failing", r"Lines, row 0: data.custom.filter = .*: raised ValueError: no 0"),
        ("filter", "vague", r"Lines, row 0: data.custom.filter = .*: returns 'yes'; it must return True or False"),
    ],
)
def test_parts_that_cannot_be_used_are_refused_before_the_start(own: Write, part: str, name: str, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        check_dataset(own(**{"dataset": "Lines", part: name}))
    assert name in str(caught.value) or part in str(caught.value) or "data.train" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data.custom.sampler": "Stages"}, "data.custom.sampler = 'Stages': must be module:name or file.py:name"),
        ({"data.custom": {"smapler": "a:b"}}, "data.custom.smapler = 'a:b': unknown key; did you mean data.custom.sam"),
        ({"data.custom": {"options": {"filter": {"a": 1}}}}, "there is no filter; name one, or leave it out"),
        ({"data.custom": {"sampler": "a:b"}, "data.weights": [1.0]}, "data.weights = [1.0] with custom.sampler: "),
        ({"data.workers": -1}, "data.workers = -1: input should be greater than or equal to 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"model.path": "m", "data.train": "t", **settings})
    assert message in str(caught.value)


def test_options_are_checked(own: Write) -> None:
    for part, option, message in (
        (
            "dataset",
            {"limt": 3},
            r"data.custom.options.dataset.limt = 3: .*:Lines has no such option; did you mean limit",
        ),
        ("sampler", {"first": "a"}, r"data.custom.options.sampler.first = 'a': input should be a valid integer"),
        ("filter", {"level": "a"}, r"data.custom.options.filter.level = 'a': input should be a valid integer"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_dataset(own(dataset="Lines", sampler="Stages", filter="above", options={part: option}))


def test_a_chat_of_a_dataset_needs_a_template(own: Write) -> None:
    with pytest.raises(
        ConfigError, match=r"Lines, row 0: the prompt is a chat, but the model's tokenizer has no chat te"
    ):
        check_dataset(own(dataset="Lines", options={"dataset": {"chats": True}}))


def test_a_filter_that_keeps_nothing_is_an_error(own: Write, dataset: Write) -> None:
    with pytest.raises(
        ConfigError, match=r"filter = .*none_of_them': returns False for 10 of the 10 rows of data.train$"
    ):
        rows(own(dataset="Lines", filter="none_of_them"), 1)
    files = [row(0, prompt="12345678901"), row(1), row(3)]
    with pytest.raises(
        ConfigError, match=r"returns False for 2 of the 3 rows of data.train, and the others are longer"
    ):
        rows(dataset(files, data__custom={"filter": f"{OWN}:even"}), 1)


def test_a_sampler_that_yields_only_rows_that_are_left_out_is_an_error(own: Write) -> None:
    with pytest.raises(ConfigError, match=r"sampler = .*: 21 rows in a row were too long or filtered"):
        rows(own(dataset="Lines", sampler="OnlyLong", filter="above"), 1)


def test_rows_that_take_long_are_checked_when_they_are_read(own: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "CHECK_S", 0.0)
    assert check_dataset(own(dataset="Broken")) == 10
    with pytest.raises(DataError, match=r"Broken, row [34]: "):
        rows(own(dataset="Broken"), 10)


def test_a_position_is_of_its_sampler(own: Write) -> None:
    with_one, without = (
        PromptCursor(own(dataset="Lines", **parts), limit_tokens=10) for parts in ({"sampler": "Stages"}, {})
    )
    places = [with_one.position, without.position]
    with pytest.raises(ConfigError, match=r"data.custom.sampler: the run was started with a sampler; resume it with"):
        without.seek(places[0])
    with pytest.raises(ConfigError, match=r"the run was started without a sampler; resume it without"):
        with_one.seek(places[1])
