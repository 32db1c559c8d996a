"""Imports, and whatever else makes millions of objects that stay, at three quarters of their time.

    with without_collection():
        import torch

While they are imported Python looks for garbage again and again, through all that was imported before, and finds none.

Invariants: afterwards garbage is looked for as before, also when an import has failed; what was there by then is left
out of that for good, since it stays until the process ends.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Look for no garbage within, and afterwards not among what is there by then."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if before:
            gc.enable()
