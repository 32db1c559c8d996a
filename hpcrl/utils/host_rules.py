"""Which hosts may be reached, as a list of words: `example.org`, `*.example.org`, `example.org:8080`, `192.0.2.7`.

Without a port a word means 80 and 443; `*.` stands for one or more labels, and not for the name without them.  Names
are compared in lower case and without a last dot; a name in another script is written as DNS has it (xn--).

Invariant: pure functions of text; what is not understood is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from hpcrl.errors import UsageError

PORTS = (80, 443)  #: of a word without one
MOST = 128  #: words of a list
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")
_SIX = re.compile(r"[0-9a-f:.]*:[0-9a-f:.]*")
_LONGEST = 253


class HostRules(NamedTuple):
    """Hosts that may be reached.

    Attributes:
        words: as `rules_of` writes them, in order; none: no host.
        also_here: addresses of this node itself may be connected to as well, which tests need, and nothing else.
    """

    words: tuple[str, ...] = ()
    also_here: bool = False

    def allow(self, name: str, port: int) -> bool:
        """Whether a host may be asked for."""
        name = plain_name(name)
        return any(_matches(word, name, port) for word in self.words)

    def covers(self, word: str) -> bool:
        """Whether all that a word of other rules allows is allowed by one word or another of these."""
        name, ports = _parts(word)
        return all(any(_matches(own, name, port) for own in self.words) for port in ports)

    def __str__(self) -> str:
        return ", ".join(self.words) or "none"


NO_HOSTS = HostRules()


def rules_of(words: Iterable[str] | HostRules, where: str) -> HostRules:
    """The rules that these words are; two lists that mean the same in another order are equal.

    Args:
        where: what the words were given as, for an error.

    Raises:
        UsageError: for one that is none.
    """
    if isinstance(words, HostRules):
        return words
    if isinstance(words, str):
        words = (words,)
    found = {_word(word, where) for word in words}
    if len(found) > MOST:
        raise UsageError(f"{where}: {len(found)} hosts", f"name {MOST} at most, or a domain: *.example.org")
    return HostRules(tuple(sorted(found)))


def uncovered(rules: HostRules, allowed: HostRules) -> list[str]:
    """Those of the words that others do not cover, and this node, if it is asked for."""
    here = ["this node itself"] if rules.also_here and not allowed.also_here else []
    return [word for word in rules.words if not allowed.covers(word)] + here


def plain_name(name: str) -> str:
    """A host's name, or its address, as it is compared."""
    return name.lower().removesuffix(".")


def split_port(text: str) -> tuple[str, int | None]:
    """(name, port or None) of `name`, `name:port`, `[address]` and `[address]:port`.

    Raises:
        ValueError: if it is none of these.
    """
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or not _SIX.fullmatch(name.lower()):
            raise ValueError(f"{text} is no address")
    else:
        name, colon, port = text.partition(":")
        rest = colon + port
    if not rest:
        return name, None
    if not re.fullmatch(r":[0-9]{1,5}", rest) or not 0 < int(rest[1:]) < 1 << 16:
        raise ValueError(f"{text} has no port from 1 to 65,535")
    return name, int(rest[1:])


def _word(text: object, where: str) -> str:
    try:
        name, port = split_port(str(text))
    except ValueError:
        name, port = "", None
    name = plain_name(name)
    six = ":" in name
    if not isinstance(text, str) or not (six or _NAME.fullmatch(name)) or len(name) > _LONGEST:
        raise UsageError(f"{where}: {text!r} is no host", "name hosts: example.org, *.example.org or example.org:8080")
    name = f"[{name}]" if six else name
    return name if port is None else f"{name}:{port}"


def _parts(word: str) -> tuple[str, tuple[int, ...]]:
    name, port = split_port(word)
    return name, PORTS if port is None else (port,)


def _matches(word: str, name: str, port: int) -> bool:
    """Whether a word allows a name, or all that a name with `*.` stands for."""
    own, ports = _parts(word)
    if port not in ports:
        return False
    return name == own or bool(own.startswith("*.") and name.endswith(own[1:]) and _NAME.fullmatch(name))
