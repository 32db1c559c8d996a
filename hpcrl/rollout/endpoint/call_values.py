"""What the forms of tool calls share: where a call is in a text, JSON inside of text, values by their schema.

Invariants: nothing here raises for what a model has written; arguments are an object that JSON in UTF-8 can spell, so
no NaN, no infinity and no half of a surrogate pair; a long text of broken calls costs little, since only the first of
them are looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

DEEPEST = 8  #: schemas inside of schemas that are looked into
TRIES = 8  #: places where an object may end
BROKEN = 64  #: broken calls of a text that are looked at; it is all text from the next one


class FoundCall(NamedTuple):
    """A well-formed call in a text.

    Attributes:
        start, end: characters of the text that it takes.
        id: as the model wrote it, "" where its form has none.
    """

    start: int
    end: int
    name: str
    arguments: dict[str, Any]
    id: str = ""


#: what finds the calls of a form in a text; the request's tools say the types of arguments
Find = Callable[[str, "Tools"], list[FoundCall]]


class Tools:
    """What a request's tools say of the types of arguments."""

    def __init__(self, tools: Sequence[Any] | None = None) -> None:
        """Read them.

        Args:
            tools: as OpenAI has them; what is no tool is passed over.
        """
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools or ():
            function = tool.get("function") if isinstance(tool, Mapping) else None
            schema = function.get("parameters") if isinstance(function, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(schema, Mapping) and isinstance(name, str):
                self._schemas[name] = schema

    def typed(self, function: str, argument: str, text: str) -> Any:
        """An argument's value from the text that the model wrote; text where the schema says nothing, or another type.

        The values of Python that chat templates write (True, None) count as those of JSON.
        """
        schema = self._schemas.get(function, {})
        properties = schema.get("properties")
        own = properties.get(argument) if isinstance(properties, Mapping) else None
        kinds = set(_kinds(own, schema))
        word = text.strip()
        if "null" in kinds and word in ("null", "None"):
            return None
        if not kinds or "string" in kinds:
            return text
        if "boolean" in kinds and word.lower() in ("true", "false"):
            return word.lower() == "true"
        value = read_json(text)
        if isinstance(value, float) and value.is_integer() and "number" not in kinds:
            value = int(value)
        if value is None:  # null has been looked for
            return text
        return value if _kind(value) in kinds or (_kind(value) == "integer" and "number" in kinds) else text


def tagged_arguments(
    text: str, at: int, argument: re.Pattern[str], close: str, typed: Callable[[str, str], Any]
) -> tuple[dict[str, Any], int]:
    """(arguments that follow one another, each in tags of its own; where they end, -1 if one has no end).

    Args:
        argument: the opening tag, with the name as its first group.
        typed: (name, text) -> the value.
    """
    found: dict[str, Any] = {}
    while (opened := argument.match(text, at)) is not None:
        if (stop := text.find(close, opened.end())) < 0:
            return {}, -1
        name = opened[1].strip()
        found[name] = typed(name, text[opened.end() : stop])
        at = stop + len(close)
    return found, at


def _kinds(schema: Any, root: Mapping[str, Any], depth: int = 0, followed: set[str] | None = None) -> Iterator[str]:
    """The types that a schema permits, as far as it names them.

    Args:
        followed: references that were: each is once, so that few of them cannot be many.
    """
    followed = set() if followed is None else followed
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return
    kind = schema.get("type")
    yield from (k for k in (kind if isinstance(kind, list) else [kind]) if isinstance(k, str))
    if kind is None and isinstance(schema.get("enum"), list):
        yield from (_kind(value) for value in schema["enum"])
    for name in ("anyOf", "oneOf", "allOf"):
        for part in schema[name] if isinstance(schema.get(name), list) else ():
            yield from _kinds(part, root, depth + 1, followed)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and reference not in followed:
        followed.add(reference)
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        yield from _kinds(found, root, depth + 1, followed)


def _kind(value: Any) -> str:
    """The type of a value of JSON."""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}
    return names.get(type(value), "")


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_SPACE = re.compile(r"\s*")


def after_space(text: str, at: int) -> int:
    """The first place from `at` where there is no white space."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def read_json(text: str) -> Any:
    """The value of a text as JSON, None if it is not JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def read_object(text: str, at: int, end: str, fence: str = "") -> tuple[dict[str, Any], int] | None:
    """(the object that is here as JSON, where the mark ends that follows it), or None.

    Args:
        end: the mark; an object may have it in a text of its own a few times.
        fence: what stands between object and mark.
    """
    at = after_space(text, at)
    stop = at if text.startswith("{", at) else -1
    for _ in range(TRIES):
        if stop < 0 or (stop := text.find(end, stop)) < 0:
            return None
        inner = text[at:stop].rstrip()
        value = read_json(inner.removesuffix(fence)) if inner.endswith(fence) else None
        stop += len(end)
        if isinstance(value, dict):
            return value, stop
    return None


def closed(text: str, at: int, mark: str) -> int:
    """Where the mark ends that comes here, behind white space; -1 if another thing comes."""
    at = after_space(text, at)
    return at + len(mark) if text.startswith(mark, at) else -1


def scan(text: str, opening: str, end: str, read: Callable[[int], FoundCall | None]) -> list[FoundCall]:
    """The calls that begin with one mark and end with another, none inside of another.

    Args:
        read: where the first mark begins -> the call there, or None if it is broken.
    """
    found, broken = [], 0
    last, at = text.rfind(end), text.find(opening)
    while 0 <= at < last and broken <= BROKEN:
        call = read(at)
        if call is None:
            broken += 1
            at += len(opening)
        else:
            found.append(call)
            at = call.end
        at = text.find(opening, at)
    return found
