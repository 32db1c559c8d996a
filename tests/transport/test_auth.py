"""Which keys an attempt has of its own."""

from __future__ import annotations

from hpcrl.run.rundir import RunDir
from hpcrl.transport.auth import make_keys


def test_engines_keep_their_key_into_the_next_attempt(rundir: RunDir) -> None:
    """All others are new: a rank that no signal could end has none that opens anything."""
    make_keys(rundir, 2)
    before = {path.name: path.read_bytes() for path in rundir.keys.iterdir()}
    make_keys(rundir, 2, engines_continue=True)
    after = {path.name: path.read_bytes() for path in rundir.keys.iterdir()}
    assert before.keys() == after.keys() and len(before) == 4
    assert [name for name in before if before[name] == after[name]] == ["http.key"]
    make_keys(rundir, 2)
    assert (rundir.keys / "http.key").read_bytes() != before["http.key"]
