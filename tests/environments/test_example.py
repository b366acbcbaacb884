"""The example of docs/environments.md: its tools, called in an episode."""

from __future__ import annotations

import re
from pathlib import Path

from asyncrl.environments.dialogue.dialogue import Dialogue
from asyncrl.environments.episode import Limits, PolicyTurn
from asyncrl.environments.player import Player
from asyncrl.environments.table import Named, load_environment
from asyncrl.wire.service_messages import NextTurn
from tests.helpers.chat_models import save_chat_model
from tests.helpers.played import play_row

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
CALL = '<tool_call>{{"name": "price", "arguments": {{"item": "{item}", "count": "3"}}}}</tool_call>'


def test_the_example_with_tools(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(# shop\.py\n.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "shop.py").write_text(code)
    save_chat_model(tmp_path)
    dialogue = Dialogue(str(tmp_path), trust_remote_code=False, max_observation_tokens=100)
    texts, read = [CALL.format(item="pear"), CALL.format(item="apple"), "1.5"], list[str]()

    def say(player: Player, wish: NextTurn, observation: list[int]) -> None:
        read.append(dialogue.chat.decode(observation))
        said = [*dialogue.chat.rendering.encode(texts.pop(0)), dialogue.chat.ends.last]
        player.receive(wish.branch, PolicyTurn(said, "completed"))

    chat = [{"role": "user", "content": "What do 3 apples cost?"}]
    prices = {"prices": {"apple": 0.5, "plum": 0.25}}
    named = load_environment(f"{tmp_path / 'shop.py'}:Shop", {})
    assert isinstance(named, Named)
    tokens, limits = dialogue.chat.begin(chat, []), Limits(2000, 200, 9, 10.0, 5.0)
    row = {"ground_truth": "1.5", "chat": chat, "extra_info": prices}
    ended = play_row(named, dialogue, say, tokens=tokens, limits=limits, **row)
    assert (ended.error, ended.reward, ended.parts["calls/price"], ended.parts["calls_failed/price"]) == ("", 1.0, 2, 1)
    assert '"name": "price"' in read[0] and "Error: there is no pear; there are apple, plum" in read[1]
    assert "\n1.5\n" in read[2]
