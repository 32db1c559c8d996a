"""Reads the `.metadata` of a torch_dist checkpoint, which is a pickle, as plain values.

A pickle may name any function to be called, and hand any object a state.  What this one may name is listed in
`records.py`, and in MAKERS here.

Invariants: every step is one of this file's: a name is looked up in these lists, where it stands for something that
cannot be called (AttributeRecord, Enum, SafeMaker, or a kind of numbers); the class or function itself is never handed
to a pickle.  What is called is a function of `values.py`; what is given a state is a record that this same pickle has
just made, and takes it as plain attributes; what is a key can be hashed.
"""

from __future__ import annotations

import enum
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PosixPath
from typing import Any, BinaryIO, ClassVar

from hpcrl.pickles import values
from hpcrl.pickles.records import ENUMS, NAMED_TUPLES, RECORDS, SENT, check_keys, class_of, fill, member
from hpcrl.pickles.values import refused, wrong


@dataclass(frozen=True)
class AttributeRecord:
    """A class whose instances are made empty and then take their attributes, once."""

    kind: type


@dataclass(frozen=True)
class Enum:
    """An enumeration, one of whose members is asked for."""

    kind: type[enum.Enum]

    def make(self, value: Any) -> enum.Enum:
        """The member with this value.

        Raises:
            UnpicklingError: if there is none.
        """
        return member(self.kind, value)


@dataclass(frozen=True)
class SafeMaker:
    """A function of hpcrl's own, which checks what it is given."""

    make: Callable[..., Any]


def _member(of: Any, name: Any) -> enum.Enum:
    if not isinstance(of, Enum) or type(name) is not str or name not in of.kind.__members__:
        raise refused("builtins.getattr of something that is not a member of a listed enumeration")
    return of.kind.__members__[name]


MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    # members of enumerations as Python 3.11.0 to 3.11.3 pickle them (Debian 12): getattr(the class, the name)
    ("builtins", "getattr"): _member,
    ("torch", "Size"): values.size,
    ("torch.serialization", "_get_layout"): values.layout,
    ("pathlib", "PosixPath"): values.plain(PosixPath, str),  # StorageMeta, where the directory was given as a path
    ("collections", "OrderedDict"): values.plain(OrderedDict),
    ("builtins", "slice"): values.plain(slice, int, type(None)),  # parts of a flattened tensor
}


def look_up(module: str, name: str) -> Any:
    """What this name stands for.  Refused if it is not listed: then nothing was imported either."""
    pair = (module, name)
    if pair in MAKERS:
        return SafeMaker(MAKERS[pair])
    if pair in SENT or pair in NAMED_TUPLES:  # in messages alone
        raise refused(f"{module}.{name}")
    found = class_of(module, name)
    if pair in RECORDS:
        return AttributeRecord(found)
    return Enum(found) if pair in ENUMS else found


#: opcodes that no writer of these pickles needs: classes of Python 2, numbered names, references and buffers out of the
#: stream
UNUSED = (
    *(pickle.INST, pickle.OBJ, pickle.DICT, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID),
    *(pickle.BINPERSID, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.BYTEARRAY8),
)


class PlainUnpickler(pickle._Unpickler):
    """Reads a pickle of plain values.  Refused for any other; what a damaged one raises, pickle says.

    Python's unpickler in Python, half as fast as the one in C: only here can it be said what each step may do.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream, fix_imports=False)
        self._empty: dict[int, Any] = {}  # records without attributes yet, by id; held, so that the id stays theirs

    def find_class(self, module: str, name: str) -> Any:
        """What the name stands for; Refused if it is not listed."""
        return look_up(module, name)

    def load_reduce(self) -> None:
        """A call."""
        parts = self.stack.pop()
        what = self.stack[-1]
        if type(parts) is not tuple or not isinstance(what, SafeMaker | Enum):
            raise refused(f"a call of a {type(what).__name__}")
        self.stack[-1] = what.make(*parts)

    def load_newobj(self) -> None:
        """An empty record."""
        parts = self.stack.pop()
        what = self.stack.pop()
        if parts != () or not isinstance(what, AttributeRecord):
            raise refused(f"an instance of a {type(what).__name__}")
        made = what.kind.__new__(what.kind)
        self._empty[id(made)] = made
        self.append(made)

    def load_build(self) -> None:
        """A record's attributes."""
        state = self.stack.pop()
        made = self.stack[-1]
        if self._empty.pop(id(made), None) is None:
            raise refused(f"a state of a {type(made).__name__}")
        fill(made, state)

    def load_setitem(self) -> None:
        check_keys(self.stack[-2:-1], self.stack[-3])
        super().load_setitem()

    def load_setitems(self) -> None:
        check_keys(self.stack[::2], self.metastack[-1][-1])
        super().load_setitems()

    def load_additems(self) -> None:
        check_keys(self.stack, self.metastack[-1][-1])
        super().load_additems()

    def load_frozenset(self) -> None:
        check_keys(self.stack, set())
        super().load_frozenset()

    def load_append(self) -> None:
        _check_list(self.stack[-2])
        super().load_append()

    def load_appends(self) -> None:
        _check_list(self.metastack[-1][-1])
        super().load_appends()

    def load_unused(self) -> None:
        """Whatever torch and Megatron have no use for."""
        raise refused("an opcode that neither torch nor Megatron writes")

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.ADDITEMS[0]: load_additems,
        pickle.FROZENSET[0]: load_frozenset,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        **dict.fromkeys((opcode[0] for opcode in UNUSED), load_unused),
    }


def read_plain(stream: BinaryIO) -> Any:
    """The value in a pickle; whatever a damaged pickle raises."""
    return PlainUnpickler(stream).load()


def _check_list(into: Any) -> None:
    if type(into) is not list:
        raise wrong("a list")
