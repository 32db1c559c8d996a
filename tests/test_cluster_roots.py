"""The releases of Slurm that the test cluster has beside the machine's: which are there, and what is said of the
others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import cluster
from tools.cluster import roots

pytestmark = pytest.mark.lint
STATUS = """\
Package: slurm-client
Status: install ok installed
Version: 99.1-1

Package: slurmctld
Status: install ok installed
Description: Slurm central management daemon
 Version: of no matter
Version: {}-1

Package: zlib1g
Version: 1:1.3
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No roots; apt knows one mirror."""
    monkeypatch.setattr(roots, "ROOTS", tmp_path / "roots")
    monkeypatch.setattr(roots, "SOURCES", tmp_path)
    monkeypatch.delenv("CLUSTER_RELEASE", raising=False)
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/a.sources").write_text(
        "# http://old.example/archive/debian\nURIs: http://mirror.example/debian\nSuites: bookworm\n"
    )
    (tmp_path / "sources.list").write_text("deb https://cloud.example/apt sdk main\n")
    return tmp_path / "roots"


def unpack(suite: str, slurm: str, packages: str = "") -> None:
    root = roots.path(suite)
    (root / "var/lib/dpkg").mkdir(parents=True)
    (root / "var/lib/dpkg/status").write_text(STATUS.format(slurm))
    (root / "packages").write_text(packages or " ".join([*roots._contents(), *roots._unstable(suite)]))


def test_a_release_by_name_or_by_version(places: Path) -> None:
    """Debian's name and the beginning of Slurm's version mean the same; the machine's own has no root."""
    unpack("trixie", "24.11.5")
    unpack("forky", "26.05.5")
    assert [roots.find(word) for word in ("forky", "26.05", "24.11", "24", "machine")] == [
        "forky",
        "forky",
        "trixie",
        "trixie",
        "",
    ]
    with pytest.raises(roots.RootError, match=r"no root of release 24.1 .*trixie \(Slurm 24.11.5\), forky"):
        roots.find("24.1")


def test_the_machines_own_unless_another_is_named(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outdated root counts for none; CLUSTER_RELEASE chooses."""
    unpack("forky", "26.05.5", packages="slurm-wlm")
    unpack("trixie", "24.11.5")
    assert roots.version("forky") is None and cluster.release() == roots.MACHINE
    monkeypatch.setenv("CLUSTER_RELEASE", "trixie")
    assert cluster.release() == "trixie"


def test_a_root_that_cannot_be_made_is_one_line(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes it and whatever the network does."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(roots.RootError, match="by root alone"):
        roots.make("forky")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    programs = places.parent / "bin"
    programs.mkdir()
    for name, text in {
        "debootstrap": "",
        "timeout": f'echo "$@" > {places.parent}/told; echo "E: no route"; exit 1',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    with pytest.raises(roots.RootError, match="debootstrap of forky.*no route$"):
        roots.make("forky")
    told = (places.parent / "told").read_text()
    assert "http://mirror.example/debian" in told and "slurmdbd" in told and "shellcheck" not in told
    assert not list(places.iterdir())
