"""The files by which the processes of an attempt find each other, carried to hosts that do not share the run directory.

What the roles publish (address, port, public key), the first error, a stop, the trainer's summary: small files of
attempts/N and summary.json.  Invariants: a file that is there already is never overwritten, but for the summary;
nothing outside of the run directory is written, whatever a message says.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from hpcrl.errors import PeerError, UsageError
from hpcrl.run.code_files import CODE, code_root
from hpcrl.run.rundir import ERROR, OVER, RunDir, write_atomic
from hpcrl.run.started_runs import LIVE
from hpcrl.run.summary import SUMMARY, summary_of
from hpcrl.utils.untrusted_files import read_regular

ALLOWED = ("attempts", "keys", CODE, LIVE, "options.json", SUMMARY)
LARGEST = 1 << 25  #: bytes of the copies of the user's modules that are carried


class FileSync:
    """What this host has seen of one attempt's files."""

    def __init__(self, rundir: RunDir) -> None:
        self.rundir = rundir
        self.seen = set[str]()

    def new(self) -> dict[str, bytes]:
        """Files that have appeared since the last look, by path."""
        here = self.rundir.here
        found = [*here.glob("peers/*.json"), here / ERROR, here / "stop", here / "end"]
        if summary_of(self.rundir) is not None:
            found += [self.rundir.root / SUMMARY, here / OVER]  # in this order they are written
        names = [str(p.relative_to(self.rundir.root)) for p in found if not p.name.startswith(".") and p.exists()]
        fresh = [name for name in names if name not in self.seen]
        self.seen.update(fresh)
        return read_files(self.rundir, fresh)

    def put(self, files: dict[str, bytes]) -> None:
        """Write what another host has sent.

        Raises:
            PeerError: as `write_files`.
        """
        self.seen.update(files)
        write_files(self.rundir, files)


def read_files(rundir: RunDir, names: list[str]) -> dict[str, bytes]:
    """The contents of files of the run directory, for a message."""
    return {name: read_regular(rundir.root / name) for name in names}


def read_code(rundir: RunDir) -> dict[str, bytes]:
    """The copies of the user's modules, for a host that does not see them; only a mark where the run does not import
    them.

    Raises:
        UsageError: if they are too large for a message, or if symbolic links are among them.
    """
    root = code_root(rundir.root)
    if root is None:
        return {}
    if (root / LIVE).exists():
        return {LIVE: b""}
    folder = root / CODE
    found = sorted(folder.rglob("*"))
    paths = [path for path in found if path.is_file() and path.suffix != ".pyc"]
    if linked := next((path for path in found if path.is_symlink()), None):
        raise UsageError(
            f"{linked} is a symbolic link, and not every host sees where it leads",
            "put --run-dir on a file system that all hosts share, or give --live-code",
        )
    if sum(path.stat().st_size for path in paths) > LARGEST:
        raise UsageError(
            f"{folder} has more than {LARGEST >> 20} MiB, and not every host sees it",
            "put --run-dir on a file system that all hosts share, or give --live-code",
        )
    return {f"{CODE}/{path.relative_to(folder)}": read_regular(path) for path in paths}


def write_files(rundir: RunDir, files: dict[str, bytes]) -> None:
    """Write files from a message.

    Raises:
        PeerError: for a path that has no business there, before anything is written.
    """
    for name in files:
        path = PurePosixPath(name)
        if (
            path.is_absolute()
            or ".." in path.parts
            or "\0" in name
            or path.parts[:1] not in {(part,) for part in ALLOWED}
        ):
            raise PeerError(f"another host sent {name!r}, which is not a file of an attempt")
    for name, data in files.items():
        target = rundir.root / name
        if target.exists() and name != SUMMARY:
            continue
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(target, data)
