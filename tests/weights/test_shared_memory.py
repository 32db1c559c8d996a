"""Memory that trainer and engines of one host share, without engines."""

from __future__ import annotations

import os

import pytest

from hpcrl.weights.shared_memory import Region, open_region


def test_what_one_side_writes_the_other_reads() -> None:
    region = Region(4096)
    seen = open_region(region.to_wire())
    region.buffer[7] = 99
    assert seen.numel() == 4096 and int(seen[7]) == 99
    region.close()
    region.buffer[7] = 98
    assert int(seen[7]) == 98, "a mapping outlives the descriptor"


def test_region_takes_memory_when_written() -> None:
    """A region takes memory only where it is written."""
    region = Region(1 << 36)
    region.buffer[1 << 35] = 1
    assert os.stat(f"/proc/self/fd/{region.fd}").st_blocks * 512 < 1 << 22
    region.close()


def test_a_region_cannot_be_cut_under_its_readers() -> None:
    region = Region(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 10)
    region.close()


def test_nothing_else_is_opened() -> None:
    region, other = Region(4096), Region(4096)
    good = region.to_wire()
    unsealed = os.memfd_create("hpcrl-weights")
    os.ftruncate(unsealed, 4096)
    for change in (
        {"inode": good["inode"] + 1},
        {"size": 64},
        {"fd": other.fd},
        {"fd": 0},
        {"fd": unsealed, "inode": os.fstat(unsealed).st_ino},
        {"fd": "3/../../self/fd/3"},
        {"pid": -1},
        {"pid": True},
        {"more": 1},
    ):
        with pytest.raises(ValueError, match=r"region"):
            open_region(good | change)
    with pytest.raises(OSError, match="No such file"):
        open_region(good | {"pid": 2**22})
    os.close(unsealed)
    region.close()
    with pytest.raises((OSError, ValueError)):
        open_region(good)
    other.close()
