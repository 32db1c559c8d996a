"""Which form of tool calls a model writes, and the calls of a turn in that form.

Invariants: the form is chosen by the chat template alone, the most particular of those whose marks the template shows;
what is no well-formed call stays in the turn's text, and every call is taken out of it once.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from hpcrl.rollout.endpoint import tool_calls
from hpcrl.rollout.endpoint.call_values import Find, FoundCall, Tools
from hpcrl.utils.plugins import PluginFolder

USUAL = "hermes"  #: of a template that shows no form


@dataclass(frozen=True)
class CallForm:
    """One form of tool calls; see `tool_calls`.

    Attributes:
        marks: texts that a template which shows it has, all of them.
        wrappers: texts around the calls of a turn.
        as_text: whether its templates read a call's arguments as JSON text.
    """

    name: str
    marks: tuple[str, ...]
    wrappers: tuple[str, ...]
    as_text: bool
    find: Find

    def split(self, text: str, tools: Sequence[Any] | None) -> tuple[str, list[FoundCall]]:
        """(the text without its calls, the calls), or the text as it is if it has none.

        Args:
            tools: the request's, as OpenAI has them.
        """
        calls = self.find(text, Tools(tools))
        if not calls:
            return text, []
        pieces, at = [], 0
        for call in calls:
            pieces.append(text[at : call.start])
            at = call.end
        left = "".join([*pieces, text[at:]])
        for wrapper in self.wrappers:
            left = left.replace(wrapper, "")
        return left.rstrip(), calls


@cache
def forms() -> tuple[CallForm, ...]:
    """All forms, those with more marks first."""
    found = []
    for name in PluginFolder(Path(tool_calls.__file__).parent, "find").names():
        module = importlib.import_module(f"{tool_calls.__name__}.{name}")
        wrappers, as_text = getattr(module, "WRAPPERS", ()), getattr(module, "ARGUMENTS_AS_TEXT", False)
        found.append(CallForm(name, module.MARKS, wrappers, as_text, module.find))
    return tuple(sorted(found, key=lambda form: -len(form.marks)))


@lru_cache(maxsize=16)
def form_of(template: str) -> CallForm:
    """The form that a chat template shows."""
    usual = next(form for form in forms() if form.name == USUAL)
    return next((form for form in forms() if all(mark in template for mark in form.marks)), usual)
