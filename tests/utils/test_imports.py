"""Imports without looking for garbage."""

from __future__ import annotations

import gc

import pytest

from hpcrl.utils.imports import without_collection


@pytest.mark.parametrize("error", [None, ImportError])
def test_garbage_is_looked_for_again(error: type[Exception] | None) -> None:
    """Not within, but afterwards, whatever happened; and what is there by then is left out."""
    try:
        with without_collection():
            assert not gc.isenabled()
            there = [[]]
            if error:
                raise error
    except ImportError:
        assert error
    assert gc.isenabled() and gc.get_freeze_count() > 0
    assert not any(found is there for found in gc.get_objects())


def test_one_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
