"""Who the engines are, how each is, and which weights it holds: the one owner of these facts.

    starting -> joining -> serving -> draining -> gone
       ^           |          |
       |           v          v
       +-------- ended <--- suspect

The law:
1. Only an engine that is serving, or draining, answers requests, and it holds the version that was published last (or a
   newer one, which it joined with while the trainer was ahead of the engines).
2. What is said of an earlier life of an engine, and of one that is gone, changes nothing; lives only grow.
3. An engine comes to serve in one way alone: up (joining), then a weight update that names this life of it (serving).
4. Whoever was in doubt (suspect) comes back as joining unless it holds the published version.

Pure: numbers and events in, decisions out; no clock, no socket.  Where nobody sends weights (`trusting`), an engine
that is up serves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

State = Literal["starting", "joining", "serving", "suspect", "draining", "ended", "gone"]
#: an engine that fails so many updates in one life, though its supervisor calls it well, is beyond help
FAILED_UPDATES = 3


@dataclass
class EngineMember:
    """One engine.  life: as `run/engine_files.py` counts; version: that it holds, None: not one of ours; why: it is
    not well;
    planned: whether the run waits for it before it begins."""

    index: int
    host: str
    state: State = "starting"
    life: int = 0
    version: int | None = None
    why: str = ""
    failed_updates: int = 0
    planned: bool = True

    @property
    def answers(self) -> bool:
        """Whether it may have requests in flight."""
        return self.state in ("serving", "draining")

    def __str__(self) -> str:
        return f"engine-{self.index} on {self.host}"


@dataclass
class Registry:
    """All engines that ever were.  limit: --engine-restarts; with 0 an engine that is in doubt is gone."""

    limit: int = 0
    trusting: bool = False
    published: int | None = None
    members: dict[int, EngineMember] = field(default_factory=dict)

    # ---- events

    def expect(self, index: int, host: str) -> None:
        """An engine of the plan, or, once weights were published, one that joins; ValueError if there was one of this
        number."""
        if index in self.members:
            raise ValueError(f"there is an engine {index} already")
        self.members[index] = EngineMember(index, host, planned=self.published is None)

    def up(self, index: int, life: int) -> None:
        """Its supervisor says that it answers, in this life."""
        member = self._of(index, life)
        if member is None or (life == member.life and member.state != "starting"):
            return
        member.life = life
        member.version = None
        member.why = ""
        member.failed_updates = 0
        member.state = "serving" if self.trusting else "joining"

    def ended(self, index: int, life: int, why: str, again: bool) -> None:
        """Its supervisor, or whoever keeps that, says that this life is over; again: another follows."""
        if (member := self._of(index, life)) is not None:
            member.life = life
            member.version = None
            member.why = why
            member.state = "ended" if again and member.state != "draining" else "gone"

    def suspect(self, index: int, life: int, why: str) -> None:
        """A request failed there, and it does not say that it is well."""
        member = self._of(index, life)
        if member is None or life != member.life or member.state not in ("serving", "draining", "joining"):
            return
        member.why = why
        member.state = "gone" if self.limit == 0 or member.state == "draining" else "suspect"

    def well(self, index: int, life: int) -> None:
        """One in doubt answers again."""
        member = self._of(index, life)
        if member is not None and life == member.life and member.state == "suspect":
            member.state, member.why = ("serving", "") if self._current(member) else ("joining", "")

    def updated(self, who: Iterable[tuple[int, int]], version: int) -> None:
        """(index, life) of those that now hold `version`, which is the one to hold; everybody else does not."""
        self.published = version
        there = set(who)
        for member in self.members.values():
            if (member.index, member.life) in there and member.state in ("joining", "serving", "draining", "suspect"):
                member.version = version
                member.failed_updates = 0
                if member.state == "joining":
                    member.state = "serving"
            elif member.state == "serving" and not self._current(member):
                member.state = "joining"
            elif member.state == "draining" and not self._current(member):
                member.state = "gone"
                member.why = "it missed an update while it was drained"

    def joined(self, who: Iterable[tuple[int, int]], version: int) -> None:
        """(index, life) of those that were given `version` by themselves, which is what the others hold, or newer."""
        self.published = version if self.published is None else self.published
        for index, life in who:
            member = self._of(index, life)
            if member is None or life != member.life or version < self.published:
                continue
            if member.state in ("joining", "serving", "suspect"):
                member.version = version
                member.failed_updates = 0
                if member.state == "joining":
                    member.state = "serving"

    def lost(self, index: int, life: int, why: str) -> None:
        """It was left out of an update in the middle: whatever it holds is not to be asked."""
        member = self._of(index, life)
        if member is None or life != member.life or member.state in ("starting", "ended", "gone"):
            return
        member.version = None
        member.why = why
        member.failed_updates += 1
        beyond_help = member.failed_updates >= FAILED_UPDATES and not member.planned
        member.state = "gone" if member.state == "draining" or self.limit == 0 or beyond_help else "suspect"

    def drain(self, index: int) -> None:
        """It gets no new requests, and is let go once it has none; KeyError if there is none of this number."""
        member = self.members[index]
        if member.state != "gone":
            member.state = "draining" if member.answers else "gone"
            member.why = "removed"

    def drained(self, index: int) -> None:
        """The last request of one that is drained has ended."""
        if (member := self.members[index]).state == "draining":
            member.state = "gone"

    def _of(self, index: int, life: int) -> EngineMember | None:
        member = self.members.get(index)
        return None if member is None or member.state == "gone" or life < member.life else member

    def _current(self, member: EngineMember) -> bool:
        return self.trusting or (member.version is not None and member.version >= (self.published or 0))

    # ---- decisions

    def serving(self) -> list[EngineMember]:
        """Who is given requests."""
        return [m for m in self.members.values() if m.state == "serving"]

    def waiting(self) -> list[EngineMember]:
        """Who answers nothing for want of weights."""
        return [m for m in self.members.values() if m.state == "joining"]

    def to_update(self) -> list[EngineMember]:
        """Who gets the weights of the next update."""
        return [m for m in self.members.values() if m.state in ("joining", "serving", "draining")]

    def starting(self) -> list[EngineMember]:
        """Who has not come up in its first life, and is waited for."""
        return [m for m in self.members.values() if m.state == "starting" and m.planned]

    def in_doubt(self) -> list[EngineMember]:
        """Who is to be asked whether it is well."""
        return [m for m in self.members.values() if m.state == "suspect"]

    def hopeless(self) -> str:
        """Why no request will ever be answered, or ""."""
        left = [m for m in self.members.values() if m.state != "gone"]
        if not left:
            return "no engine is left: " + ", ".join(f"{m} {m.why}" for m in self.members.values())
        if (worn := next((m for m in left if m.failed_updates >= FAILED_UPDATES), None)) is not None:
            return f"{worn} failed {worn.failed_updates} weight updates, the last with: {worn.why}"
        return ""
