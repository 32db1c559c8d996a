"""What a pickle is refused with.

Invariant: Refused is for what may well be whole but is not on the list; a damaged pickle raises UnpicklingError or what
Python does.
"""

from __future__ import annotations

import pickle

from hpcrl.errors import HpcrlError


class Refused(HpcrlError, pickle.UnpicklingError):
    """A pickle names, or asks for, something that is not on the list."""


def refused(what: str) -> Refused:
    """`what` (a name, mostly) is not on the list of `names.py`."""
    return Refused(
        f"a message of another rank, or a checkpoint's .metadata, holds {what}, which is not on hpcrl's list of plain values (not damage)",
        "own functions may send numbers, texts, lists, dicts and tensors between ranks; a name of torch or Megatron-core comes with"
        " versions that docs/install.md does not list",
    )


def wrong(what: str) -> pickle.UnpicklingError:
    """A listed name, with other parts than torch and Megatron write it with."""
    return pickle.UnpicklingError(f"{what} has other parts than it is written with")
