"""Reads pickles from other processes and programs as plain values.

torch's object collectives (all_gather_object and kin) and the `.metadata` of a torch_dist checkpoint are pickles, and a
pickle may name any function to be called, and hand any object a state.  Invariant: every step is one of this file's: a
name is looked up in `names.py`; what is called is a function of `values.py`; what is given a state is a record that
this same pickle has just made, and takes it as plain attributes; what is a key can be hashed.
"""

from __future__ import annotations

import enum
import pickle
from pathlib import PurePosixPath
from typing import Any, BinaryIO, ClassVar

from hpcrl.pickles.names import AttributeRecord, Enum, SafeMaker, look_up
from hpcrl.pickles.values import refused, wrong

#: opcodes that no writer of these pickles needs: classes of Python 2, numbered names, references and buffers out of the
#: stream
UNUSED = (
    *(pickle.INST, pickle.OBJ, pickle.DICT, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID),
    *(pickle.BINPERSID, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.BYTEARRAY8),
)
ATOMS = frozenset((str, int, float, complex, bytes, bool, type(None)))
DEEP, LONG = (
    3,
    32,
)  #: tuples within tuples, and parts of each, that are keys: Python hashes them without a limit of its own


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
        _fill(made, state)

    def load_setitem(self) -> None:
        _check_keys(self.stack[-2:-1], self.stack[-3])
        super().load_setitem()

    def load_setitems(self) -> None:
        _check_keys(self.stack[::2], self.metastack[-1][-1])
        super().load_setitems()

    def load_additems(self) -> None:
        _check_keys(self.stack, self.metastack[-1][-1])
        super().load_additems()

    def load_frozenset(self) -> None:
        _check_keys(self.stack, set())
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


def _fill(made: Any, state: Any) -> None:
    """Give a record its attributes.  UnpicklingError for a state that none of them is written with."""
    import torch
    from torch.distributed.checkpoint.metadata import MetadataIndex

    if type(made).__name__ == "TensorProperties":
        kinds = (torch.dtype, torch.layout, bool, enum.Enum, bool)  # which its own __setstate__ takes
        if type(state) is not tuple or len(state) != len(kinds) or not all(map(isinstance, state, kinds)):
            raise wrong("TensorProperties")
        made.__setstate__(state)
        return
    if type(state) is not dict or any(type(name) is not str or name.startswith("__") for name in state):
        raise wrong(type(made).__name__)
    hashed = state.get("fqn"), state.get("offset")
    if isinstance(made, MetadataIndex) and not (type(hashed[0]) is str and isinstance(hashed[1], torch.Size | None)):
        raise wrong("MetadataIndex")  # it is a key
    made.__dict__.update(state)


def _check_list(into: Any) -> None:
    if type(into) is not list:
        raise wrong("a list")


def _check_keys(keys: list[Any], into: Any) -> None:
    """UnpicklingError unless `into` is a dict or set, and these keys can be hashed at once."""
    if not isinstance(into, dict | set) or not all(type(key) in ATOMS or _is_key(key, DEEP) for key in keys):
        raise wrong("a dict or set")


def _is_key(key: Any, depth: int) -> bool:
    import torch
    from torch.distributed.checkpoint.metadata import MetadataIndex

    if isinstance(key, tuple | frozenset):  # torch.Size too
        return depth > 0 and len(key) <= LONG and all(_is_key(part, depth - 1) for part in key)
    known = (enum.Enum, PurePosixPath, torch.dtype)
    return type(key) in ATOMS or isinstance(key, known) or (isinstance(key, MetadataIndex) and "fqn" in key.__dict__)
