"""Between messages and tokens: what environments say, and what the policy said.

dialogue.py      both kinds of dialogue of a run
plain.py         without a template: observations are encoded as they are
chat.py          with the model's chat template: begin, follow, parse
rendering.py     the template, and the tokens of what it renders
conversation.py  the tokens of a complete conversation, in which sampled tokens stay
formats.py       how models write calls of tools, and reasoning
checks.py        whether a template can be used, before a run starts
"""

from asyncrl.environments.dialogue.chat import ChatDialogue
from asyncrl.environments.dialogue.dialogue import Dialogue
from asyncrl.environments.dialogue.plain import MARK, DialogueError, TextDialogue

__all__ = ["MARK", "ChatDialogue", "Dialogue", "DialogueError", "TextDialogue"]
