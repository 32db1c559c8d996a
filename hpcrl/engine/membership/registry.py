"""Who the engines are, how each is, and which weights it holds: the one owner of these facts.

    starting -> joining -> serving
       ^           |          |
       |           v          v
       +-------- ended <--- suspect -> gone

The law:
1. Only an engine that is serving answers requests, and it holds the version that was published last (or a newer one,
   which it joined with while the trainer was ahead of the engines).
2. What is said of an earlier incarnation of an engine, and of one that is gone, changes nothing; incarnations
   only grow.
3. An engine comes to serve in one way alone: up (joining), then a weight update that names this incarnation (serving).
4. An engine in doubt (suspect) comes back as joining unless it holds the published version.

Pure: numbers and events in, decisions out; no clock, no socket.  Where no weights are sent (`trusting`), an engine
that is up serves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from hpcrl.engine.membership.http import Address

State = Literal["starting", "joining", "serving", "suspect", "ended", "gone"]


@dataclass
class Engine:
    """One engine, as the registry keeps it, and as the sender of weights sees it.

    Attributes:
        incarnation: of its process, each greater than the one before (`run/engine_files.py`).
        first: the one with which it began in this attempt, None before it has been heard of.
        address: where it answers in this incarnation, None before it has come up.
        model_len: tokens of prompt and response together that it can hold, None if it did not say.
        version: of its weights, None: not one of ours.
        why: it is not well.
    """

    index: int
    host: str
    state: State = "starting"
    incarnation: int = 0
    address: Address | None = None
    model_len: int | None = None
    version: int | None = None
    why: str = ""
    first: int | None = None

    @classmethod
    def at(cls, address: Address, index: int, incarnation: int = 0) -> Engine:
        """An engine that answers there; nothing more is known of it."""
        return cls(index, address.host, incarnation=incarnation, address=address)

    @property
    def restarts(self) -> int:
        """How often it was started again in this attempt."""
        return 0 if self.first is None else self.incarnation - self.first

    def __str__(self) -> str:
        return f"engine-{self.index} on {self.host}"


@dataclass
class Registry:
    """All engines that ever were.

    Attributes:
        limit: --attempts less one; with 0 an engine that is in doubt is gone.
    """

    limit: int = 0
    trusting: bool = False
    published: int | None = None
    members: dict[int, Engine] = field(default_factory=dict)

    # ---- events

    def expect(self, index: int, host: str) -> None:
        """An engine of the run.

        Raises:
            ValueError: if there was one of this number.
        """
        if index in self.members:
            raise ValueError(f"there is an engine {index} already")
        self.members[index] = Engine(index, host)

    def up(self, index: int, incarnation: int, address: Address | None = None, model_len: int | None = None) -> None:
        """Its supervisor says that it answers, in this incarnation."""
        member = self._member(index, incarnation)
        if member is None or (incarnation == member.incarnation and member.state != "starting"):
            return
        self._start_incarnation(member, incarnation)
        member.address = address
        member.model_len = model_len
        member.version = None
        member.why = ""
        member.state = "serving" if self.trusting else "joining"

    def ended(self, index: int, incarnation: int, why: str, again: bool) -> None:
        """Its supervisor, or the process that keeps that, says that this incarnation is over.

        Args:
            again: another follows.
        """
        if (member := self._member(index, incarnation)) is not None:
            self._start_incarnation(member, incarnation)
            member.version = None
            member.why = why
            member.state = "ended" if again else "gone"

    def suspect(self, index: int, incarnation: int, why: str) -> None:
        """A request failed there, and it does not say that it is well."""
        member = self._member(index, incarnation)
        if member is None or incarnation != member.incarnation or member.state not in ("serving", "joining"):
            return
        member.why = why
        member.state = "gone" if self.limit == 0 else "suspect"

    def well(self, index: int, incarnation: int) -> None:
        """One in doubt answers again."""
        member = self._member(index, incarnation)
        if member is not None and incarnation == member.incarnation and member.state == "suspect":
            member.state, member.why = ("serving", "") if self._current(member) else ("joining", "")

    def updated(self, who: Iterable[tuple[int, int]], version: int) -> None:
        """(index, incarnation) of those that now hold `version`, which is the one to hold; everybody else does not."""
        self.published = version
        there = set(who)
        for member in self.members.values():
            if (member.index, member.incarnation) in there and member.state in ("joining", "serving", "suspect"):
                member.version = version
                if member.state == "joining":
                    member.state = "serving"
            elif member.state == "serving" and not self._current(member):
                member.state = "joining"

    def joined(self, who: Iterable[tuple[int, int]], version: int) -> None:
        """(index, incarnation) of those that were given `version` by themselves, which is what the others hold, or
        newer."""
        self.published = version if self.published is None else self.published
        for index, incarnation in who:
            member = self._member(index, incarnation)
            if member is None or incarnation != member.incarnation or version < self.published:
                continue
            if member.state in ("joining", "serving", "suspect"):
                member.version = version
                if member.state == "joining":
                    member.state = "serving"

    def _member(self, index: int, incarnation: int) -> Engine | None:
        member = self.members.get(index)
        return None if member is None or member.state == "gone" or incarnation < member.incarnation else member

    @staticmethod
    def _start_incarnation(member: Engine, incarnation: int) -> None:
        member.incarnation = incarnation
        member.first = incarnation if member.first is None else member.first

    def _current(self, member: Engine) -> bool:
        return self.trusting or (member.version is not None and member.version >= (self.published or 0))

    # ---- decisions

    def serving(self) -> list[Engine]:
        """Who is given requests."""
        return [m for m in self.members.values() if m.state == "serving"]

    def waiting(self) -> list[Engine]:
        """Engines that answer nothing because they have no weights."""
        return [m for m in self.members.values() if m.state == "joining"]

    def to_update(self) -> list[Engine]:
        """Who gets the weights of the next update."""
        return [m for m in self.members.values() if m.state in ("joining", "serving")]

    def starting(self) -> list[Engine]:
        """Who has not come up in its first incarnation, and is waited for."""
        return [m for m in self.members.values() if m.state == "starting"]

    def in_doubt(self) -> list[Engine]:
        """Who is to be asked whether it is well."""
        return [m for m in self.members.values() if m.state == "suspect"]

    def hopeless(self) -> str:
        """Why no request will ever be answered, or ""."""
        left = [m for m in self.members.values() if m.state != "gone"]
        if not left:
            return "no engine is left: " + ", ".join(f"{m} {m.why}" for m in self.members.values())
        return ""
