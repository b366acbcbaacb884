"""Parts of the data as a user writes them, for `data.custom`."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Lines:
    """Numbers from the lines of files, with what a reward needs."""

    def __init__(self, files: list[str], *, limit: int = 1000, chats: bool = False) -> None:
        self.lines = [line for file in files for line in Path(file).read_text().splitlines()][:limit]
        self.chats = chats

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, row: int) -> dict[str, Any]:
        text = self.lines[row]
        prompt = [{"role": "user", "content": text}] if self.chats else text
        return {"prompt": prompt, "reward_model": {"ground_truth": text}, "extra_info": {"level": row % 4}, "n": row}


def listed(files: list[str]) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}=", "reward_model": {"ground_truth": str(i)}, "data_source": "own"} for i in range(6)]


class Broken(Lines):
    def __getitem__(self, row: int) -> Any:
        if row == 3:
            raise KeyError("no such line")
        return super().__getitem__(row) if row != 4 else "text"


def empty(files: list[str]) -> list[dict[str, Any]]:
    return []


def nothing(files: list[str]) -> None: ...


def without_truth(files: list[str]) -> list[dict[str, Any]]:
    return [{"prompt": "1="}]


def numbers_for_prompts(files: list[str]) -> list[dict[str, Any]]:
    return [{"prompt": 1, "reward_model": {"ground_truth": "1"}}]


class Stages:
    """The rows of the first stage, then those of all; each epoch shuffled by the seed and its number."""

    def __init__(self, rows: Any, *, seed: int, first: int = 3) -> None:
        self.sizes, self.seed = [first, len(rows)], seed
        self.epoch = self.taken = 0
        assert rows[0]["reward_model"]["ground_truth"] is not None

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.sizes[min(self.epoch, 1)]))
        random.Random(self.seed + self.epoch).shuffle(order)
        while self.taken < len(order):
            self.taken += 1
            yield order[self.taken - 1]
        self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


class Forgetful(Stages):
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Wild(Stages):
    def __iter__(self) -> Iterator[Any]:
        yield 99


class Silent(Stages):
    def __iter__(self) -> Iterator[int]:
        return iter(())


class Curriculum(Stages):
    def update(self, batch: Any) -> None: ...


class OfVerl(Stages):
    def __init__(self, data_source: Any, data_config: Any) -> None: ...


class Huge(Stages):
    def state_dict(self) -> dict[str, Any]:
        return {"rows": "x" * (2 << 20)}


class Generators(Stages):
    def state_dict(self) -> dict[str, Any]:
        return {"random": random.Random(1)}


class Stateless:
    def __init__(self, rows: Any) -> None: ...
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class OnlyLong(Stages):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


def above(row: dict[str, Any], *, level: int = 1) -> bool:
    return row["extra_info"]["level"] > level


def even(row: dict[str, Any]) -> bool:
    return int(row["reward_model"]["ground_truth"]) % 2 == 0


def none_of_them(row: dict[str, Any]) -> bool:
    return False


def failing(row: dict[str, Any]) -> bool:
    raise ValueError(f"no {row['prompt']}")


def vague(row: dict[str, Any]) -> Any:
    return "yes"


def killing(row: dict[str, Any]) -> bool:
    """Kills its process at row 5 as often as the number in the file `kills`."""
    file = Path(os.environ["OWN_PARTS_KILLS"])
    if row["reward_model"]["ground_truth"] == "5" and (left := int(file.read_text())):
        file.write_text(str(left - 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def hanging(row: dict[str, Any]) -> bool:
    if row["reward_model"]["ground_truth"] == "2":
        time.sleep(4)
    return True
