"""What a rank asks of its process groups in a step: recorded by the fake device, compared between ranks.

    differing(records, stages) -> the first place where two ranks would wait for one another, in words; "" if none

Invariant: two ranks of one pipeline stage have asked for the same, in the same order, kind by kind and byte by byte,
except for bytes that depend on the rank's own rows; and what one stage sends, the next one receives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from hpcrl.planning.rehearsal.ranks import Boundary

#: the phases of a rehearsed step, in order, by the names that reports and tables have for them
START = "start"
RESUME = "resume"
LOGPROBS = "log-probs"
TRAINS = "forward and backward"
STEP = "optimizer step"
SAVE = "save"
UPDATE = "weight update"
PHASES = (START, RESUME, LOGPROBS, TRAINS, STEP, SAVE, UPDATE)
#: whose bytes depend on what each rank has for the others
UNEVEN = ("alltoall_base_", "alltoall_")
#: (operation, phases): whose bytes depend on how many of a rank's rows are trained on
OF_ROWS = ("allreduce_", (LOGPROBS, TRAINS))
#: two ranks and the kind of a group -> whether as many rows are trained on in both of theirs
Sizes = Callable[[int, int, str], bool]
SENDS = "send"
RECEIVES = ("recv_", "recv_any_source_")


class GroupCall(msgspec.Struct, frozen=True, array_like=True):
    """One collective, or one message.

    Attributes:
        group: its kind ("tp", "dp-cp", ...), or its ranks.
        what: torch's operation.
        bytes: of its tensors.
        peer: of a message, the other rank; of a collective -1.
        phase: of the step.
    """

    group: str
    what: str
    bytes: int
    peer: int = -1
    phase: str = ""

    def __str__(self) -> str:
        where = f" with rank {self.peer}" if self.peer >= 0 else ""
        return f"{self.what.strip('_')} of {self.bytes:,} bytes in group {self.group}{where}"


class Recorder:
    """Calls of one rank in order.

    Attributes:
        calls: so far.
        phase: in which they are made.
    """

    def __init__(self, rank: int, kinds: Mapping[tuple[int, ...], str]) -> None:
        self.rank = rank
        self.calls: list[GroupCall] = []
        self.phase = ""
        self._kinds = kinds
        self._groups: dict[str, tuple[int, ...]] = {}

    def record(self, func: Any, args: Sequence[Any]) -> None:
        """One of torch's `c10d` operations, as it is called."""
        from torch import ScriptObject, distributed

        groups = (distributed.ProcessGroup.unbox(each) for each in args if isinstance(each, ScriptObject))
        group = next(groups, None)
        if group is None:
            return
        ranks = self._ranks(group)
        if len(ranks) == 1:
            return
        what = func._schema.name.removeprefix("c10d::")
        size = sum(each.numel() * each.element_size() for each in _tensors(args[:1]))
        peer = -1
        if what == SENDS or what in RECEIVES:
            places = [each for each in args if isinstance(each, int)]
            peer = ranks[places[0]]
        self.calls.append(GroupCall(self._kinds.get(ranks, f"of ranks {_few(ranks)}"), what, size, peer, self.phase))

    def _ranks(self, group: Any) -> tuple[int, ...]:
        import torch.distributed as dist

        name = group.group_name
        if name not in self._groups:
            world = dist.distributed_c10d._world
            self._groups.update((called, tuple(world.pg_group_ranks[each])) for each, called in world.pg_names.items())
        return self._groups.get(name, ())


def _tensors(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif hasattr(value, "element_size"):
            yield value


def _few(ranks: Sequence[int]) -> str:
    shown = ",".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown},... ({len(ranks)})"


# ---- between ranks


def differing(
    records: Mapping[int, Sequence[GroupCall]], stages: Mapping[int, int], sizes: Sizes = lambda *_: True
) -> str:
    """Where two ranks do not fit together, naming both and the first collective that differs.

    Args:
        stages: of each rank.
        sizes: whether two ranks train on as many rows in their groups of a kind (`ranks.same_rows`).
    """
    first: dict[int, int] = {}
    for rank in sorted(records):
        other = first.setdefault(stages[rank], rank)
        if other != rank and (found := _unlike(other, records[other], rank, records[rank], sizes)):
            return found
    for sender in sorted(records):
        for receiver in sorted(records):
            found = _unsent(sender, records[sender], receiver, records[receiver])
            if found:
                return found
    return ""


def _unlike(one: int, calls: Sequence[GroupCall], two: int, others: Sequence[GroupCall], sizes: Sizes) -> str:
    """The first call that ranks of one stage do not share."""
    mine, theirs = ([call for call in some if call.peer < 0] for some in (calls, others))
    for number, (a, b) in enumerate(zip_longest(mine, theirs), 1):
        if a is None or b is None or _shape(a, one, two, sizes) != _shape(b, one, two, sizes):
            return (
                f"ranks {one} and {two} are of one pipeline stage and differ at their collective {number}: "
                f"{_describe_call(one, a)}, {_describe_call(two, b)}"
            )
    return ""


def _describe_call(rank: int, call: GroupCall | None) -> str:
    return f"rank {rank} has none left" if call is None else f"rank {rank} asks for {call} ({call.phase})"


def _shape(call: GroupCall, one: int, two: int, sizes: Sizes) -> tuple[str, str, int]:
    what, phases = OF_ROWS
    of_rows = call.what == what and call.phase in phases
    even = call.what not in UNEVEN and (not of_rows or sizes(one, two, call.group))
    return call.group, call.what, call.bytes if even else 0


def unlike_messages(records: Mapping[int, Sequence[GroupCall]], between: Sequence[Boundary]) -> str:
    """Where a stage does not receive what the one before it sends, or the other way round; "" if there is no such
    place. What a rank sends to the stage after its own is what each of a stage like it sends."""
    for each in between:
        if each.sender in records and each.receiver in records:
            a, b = records[each.sender], records[each.receiver]
            found = _unsent(each.sender, a, each.receiver, b, each.to, each.source)
            found = found or _unsent(each.receiver, b, each.sender, a, each.source, each.to)
            if found:
                return f"stages {each.stages[0]} and {each.stages[1]}, told by ranks of stages like them: {found}"
    return ""


def _unsent(
    sender: int,
    sends: Sequence[GroupCall],
    receiver: int,
    receives: Sequence[GroupCall],
    to: int | None = None,
    source: int | None = None,
) -> str:
    """The first message between two ranks that only one of them knows.

    Args:
        to, source: whom they name for one another; None: these two.
    """
    to, source = receiver if to is None else to, sender if source is None else source
    sent = [call for call in sends if call.what == SENDS and call.peer == to]
    got = [call for call in receives if call.what in RECEIVES and call.peer == source]
    for number, (a, b) in enumerate(zip_longest(sent, got), 1):
        if a is None or b is None or a.bytes != b.bytes:
            calls = f"{_describe_call(sender, a)}, {_describe_call(receiver, b)}"
            return f"message {number} from rank {sender} to rank {receiver}: {calls}"
    return ""


def totals(calls: Sequence[GroupCall]) -> list[tuple[str, str, int, int]]:
    """(group, operation, how often, bytes), the most bytes first."""
    often: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    for call in calls:
        key = call.group, call.what.strip("_")
        often[key] += 1
        size[key] += call.bytes
    return [(*key, often[key], size[key]) for key in sorted(often, key=lambda key: -size[key])]
