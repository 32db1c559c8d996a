"""Compiled code of one role on one node: unpacked before it starts, packed once by a start that found none.

    code = KeptCode(options, rundir, "engine", part, base, spare)
    environment = base | code.variables
    code.watch(compiled)            # a thread, on the one node that packs
    code.finish()                   # at a good end

The compilers' caches lie on the node's own disk, in a directory of the role's shape (`shape.py`). Where that is empty,
the shape's archive is unpacked there (`archive.py`); where there is no archive, it is written once no file has changed
for a while.

Invariants: nothing here ends a run: what cannot be read or written is one line in the role's log, and the role
compiles for itself. Nothing is packed while files change. Of all nodes of a shape one packs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.run.compile_cache.archive import END, FOLDERS, Listing, listing, pack, unpack
from hpcrl.run.compile_cache.shape import machine_facts, role_facts, shape_of
from hpcrl.run.gpu_environment import CACHES, Role, cache_directory, compile_caches
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir
from hpcrl.run.scratch import is_own_directory
from hpcrl.run.started_runs import is_run
from hpcrl.utils.untrusted_files import Damaged

DEFAULT = f".hpcrl-compiled-{os.getuid()}"  #: its name next to a run's directory, where other users may have runs too
LAST = 5.0  #: seconds to pack at the end of a role, which its host ends by force a little later
#: seconds in which no file has changed before they are packed: one may be half written otherwise,
QUIET = 5.0
SETTLED = 60.0  #: and where the role compiles as it works
UNUSED = 14 * 86400.0  #: seconds after which a directory of the node that no role has used goes
SHAPE = re.compile(r"[a-z]+-[0-9a-f]{24}")
#: torch would compile its C++ headers first, 150 MB for the processor alone, into the process's temporary directory:
#: an engine's own goes with the engine, and what is there would be compiled again at every start
ALSO = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
JOB = re.compile(r"[A-Z]+_JOB_?ID")
NUMBER = re.compile(r"[0-9]+")


class CodePlaces(NamedTuple):
    """Where a role's compiled code is.

    Attributes:
        shape: name of the archive.
        here: on this node.
        kept: the directory of archives, on all nodes.
    """

    shape: str
    here: Path
    kept: Path


class KeptCode:
    """The compiled code of one role on this node.

    Attributes:
        variables: of the role's environment.
    """

    def __init__(
        self,
        options: Options,
        rundir: RunDir,
        role: Role,
        part: tuple[int, ...],
        base: Mapping[str, str],
        spare: Path | None = None,
        keep: bool = True,
    ) -> None:
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._earlier = False  # whether code of earlier starts is here
        self.where: CodePlaces | None = None
        try:
            self.where = _where(options, rundir, role, part, base) if keep else None
        except (HpcrlError, OSError, Damaged) as error:
            say(f"note: compile cache: {error}; none is kept")
        self.variables = compile_caches(base, spare, self.where.here if self.where else None)
        if self.where:
            self.variables |= {name: value for name, value in ALSO.items() if name not in base}
            self._noted(self._restore)

    def watch(self, compiled: bool = False) -> None:
        """Have a thread write the archive, if there is none.

        Args:
            compiled: whether what is compiled at the start is there already.
        """
        if self.where and self._thread is None and not (self.where.kept / (self.where.shape + END)).exists():
            wait = QUIET if compiled else SETTLED
            self._thread = threading.Thread(target=self._watch, args=(wait,), name="compiled code", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """The role is about to end: the archive is written meanwhile."""
        self._ending.set()

    def finish(self) -> None:
        """The role has ended well: wait for that, but no longer than LAST."""
        self.end()
        if self._thread is not None:
            self._thread.join(LAST)

    def discard(self) -> None:
        """The role died before it was up: code of earlier starts, which may be why, goes."""
        if self.where and self._earlier:
            self._noted(self._discard)

    def _noted(self, work: Callable[[], bool | None]) -> bool | None:
        """Do what may fail. Returns what `work` does, or True after an error, which is one line in the log."""
        assert self.where
        try:
            return work()
        except (OSError, Damaged, HpcrlError, MemoryError) as error:
            say(f"note: compile cache: {error}; without effect on the run ({self.where.kept}, {self.where.shape})")
            return True

    def _restore(self) -> None:
        assert self.where
        shape, here, kept = self.where
        os.utime(here)
        begun = time.monotonic()
        try:
            if found := listing(here):
                self._say(found, "there from an earlier start")
            else:
                found = unpack(here, kept, shape)
                self._say(found, f"unpacked in {time.monotonic() - begun:.1f} s")
        except FileNotFoundError:
            say(f"compile cache: nothing kept for this shape yet ({kept}, {shape})")
        finally:
            self._earlier = bool(listing(here))
            _remove_unused(here.parent)

    def _discard(self) -> None:
        assert self.where
        shape, here, kept = self.where
        (kept / (shape + END)).unlink(missing_ok=True)
        for folder in FOLDERS:
            shutil.rmtree(here / folder, ignore_errors=True)
        say(
            "compile cache: this role died before it was up, perhaps by code that earlier ones compiled: the archive "
            f"and the files on this node are removed, and the next start compiles for itself ({kept}, {shape})"
        )

    def _watch(self, wait: float) -> None:
        """Until the archive is written: look every second whether the files have settled."""
        assert self.where
        while True:
            ending = self._ending.wait(1.0)
            newest = max((changed for _, changed in listing(self.where.here).values()), default=0.0)
            quiet = not 0 <= time.time() - newest < (QUIET if ending else wait)
            if newest and quiet and self._noted(self._pack):
                return
            if ending and not newest:
                return
            if ending:
                time.sleep(0.2)

    def _pack(self) -> bool:
        """Whether the archive is written; False if a file has changed meanwhile."""
        assert self.where
        begun = time.monotonic()
        if (found := pack(self.where.here, self.where.kept, self.where.shape)) is None:
            return False
        self._say(found, f"packed in {time.monotonic() - begun:.1f} s")
        return True

    def _say(self, found: Listing, how: str) -> None:
        assert self.where
        size = sum(size for size, _ in found.values())
        say(f"compile cache: {len(found)} files, {size / 2**20:.1f} MiB, {how} ({self.where.kept}, {self.where.shape})")


def _where(
    options: Options, rundir: RunDir, role: Role, part: tuple[int, ...], base: Mapping[str, str]
) -> CodePlaces | None:
    """None where all places of compiled code are the user's."""
    if set(base) >= set(CACHES):
        return None
    root = cache_directory()
    if root is None:
        return None
    if named_after_job(root, base):
        say(f"compile cache: {root} has another path in each job, where compiled code is of no use: none is kept")
        return None
    shape = shape_of(role_facts(role, options, part) | machine_facts(root, base))
    here = cache_directory(shape)
    return here and CodePlaces(shape, here, kept_directory(rundir.root))


def named_after_job(root: Path, base: Mapping[str, str]) -> bool:
    """Whether a path has the number of the batch job, which every scheduler's environment has by such a name."""
    jobs = [found[0] for name in base if JOB.fullmatch(name) and (found := NUMBER.match(base[name]))]
    return any(job in NUMBER.findall(str(root)) for job in jobs)


def _remove_unused(root: Path) -> None:
    """Remove the directories of shapes that no role of this node has begun to use for UNUSED."""
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            if SHAPE.fullmatch(path.name) and is_own_directory(path) and time.time() - path.stat().st_mtime > UNUSED:
                shutil.rmtree(path, ignore_errors=True)


def kept_directory(root: Path) -> Path:
    """The directory of archives of a run, or of a stage of one."""
    whole = root.parent if is_run(root.parent) and not is_run(root) else root
    return whole.parent / DEFAULT
