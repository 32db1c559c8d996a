"""The Python that runs a box's first process where another program makes the box: it has to run in any image.

An image may have no Python, another C library than the node, or no file at all but one program.  So the interpreter,
the shared libraries that it needs, their loader, and the modules that the first process imports are copied into one
directory of the node's, which each box sees as /.hpcrl, read-only.  The loader is called by its name, with the
directory of these libraries, so that no library of the image's takes the place of one of these; what an image names in
/etc/ld.so.preload is not loaded either, for the copy of the loader looks for that file next to itself.

Invariant: what is in the directory is this package and Python's own, and nothing else of the machine.
"""

from __future__ import annotations

import compileall
import hashlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

from hpcrl.errors import HpcrlError
from hpcrl.sandbox.kinds.inside import FIRST, INSIDE, settings
from hpcrl.sandbox.private_root import SYSTEM

_SECONDS = 60.0
#: where glibc's loader looks for libraries to load first, and a name of the same length where there is no such file
_PRELOADED = (b"/etc/ld.so.preload", f"{INSIDE}/so/preload".encode())
_PACKAGE = Path(__file__).parents[2]
_PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
#: what the first process imports, where each module lies, and what is mapped
_ASK = f"""
import sys
sys.path.insert(0, sys.argv[1])
import encodings.ascii, encodings.latin_1, encodings.unicode_escape, encodings.utf_8, json, os, runpy, traceback
import {FIRST}
maps = [line.split(None, 5)[5] for line in open("/proc/self/maps").read().splitlines() if "/" in line]
modules = {{name: module.__file__ for name, module in sys.modules.items() if getattr(module, "__file__", None)}}
print(json.dumps([modules, sorted(set(maps)), os.path.realpath("/proc/self/exe")]))
"""


def runtime_identity() -> str:
    """What changes when the directory has to be made again."""
    found = [sys.version, os.path.realpath(sys.executable), str(_PACKAGE)]
    for path in sorted((_PACKAGE / "sandbox").rglob("*")):
        at = path.stat()
        if path.suffix == ".py":
            found.append(f"{path} {at.st_mtime_ns} {at.st_size}")
    return hashlib.sha256("\0".join(found).encode(errors="surrogateescape")).hexdigest()[:20]


def make_runtime(root: Path) -> None:
    """Put it together in a directory that is not there yet.

    Raises:
        HpcrlError: if this interpreter cannot say what it needs.
        OSError: if there is no room.
    """
    words = [sys.executable, "-I", "-S", "-c", _ASK, str(_PACKAGE.parent)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise HpcrlError(f"{sys.executable} does not say what it is made of: {said[0]}")
    modules, maps, program = json.loads(done.stdout)
    libraries = root / "so"
    standard = root / sys.platlibdir / _PYTHON
    for folder in (libraries, root / "bin", standard / "lib-dynload"):
        folder.mkdir(parents=True)
    shutil.copy(program, root / "bin" / "python3")
    needing = [program]
    for name, file in modules.items():
        if file.endswith(".so"):
            shutil.copy(file, standard / "lib-dynload" / os.path.basename(file))
            needing.append(file)
        elif name != "__main__":
            place = standard / name.replace(".", "/")
            place = place / "__init__.py" if os.path.basename(file).startswith("__init__.") else Path(f"{place}.py")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, place)
    loader = next((path for path in maps if os.path.basename(path).startswith(("ld-", "ld.so"))), "")
    if not loader:
        raise HpcrlError(f"{sys.executable} is linked in a way that is not known here")
    (libraries / "ld.so").write_bytes(Path(loader).read_bytes().replace(*_PRELOADED))
    (libraries / "ld.so").chmod(0o755)
    for file in needing:
        for name, path in _needed(loader, file):
            shutil.copy(path, libraries / name)
    compileall.compile_dir(
        str(standard), quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, workers=1
    )


def _needed(loader: str, file: str) -> list[tuple[str, str]]:
    """(name, path) of each library that a program or library is linked with."""
    done = subprocess.run([loader, "--list", file], capture_output=True, text=True, timeout=_SECONDS, check=False)
    found = []
    for line in done.stdout.splitlines():
        name, arrow, path = line.strip().partition(" => ")
        path = path.rpartition(" (")[0]
        if arrow and path.startswith("/"):
            found.append((os.path.basename(name), path))
    return found


def system_identity() -> str:
    """What changes when the directory of `make_system` has to be made again."""
    found = [(folder, os.path.isdir(folder), os.path.realpath(folder)) for folder in SYSTEM]
    return hashlib.sha256(json.dumps([found, *settings()]).encode()).hexdigest()[:20]


def make_system(root: Path) -> None:
    """An empty root, with a place for each directory and setting of the machine's that a box of "system" sees."""
    for name in ("dev", "proc", "sys", "tmp", "run", "home", "root", "var/tmp", "work", "etc", INSIDE[1:]):
        (root / name).mkdir(parents=True)
    for folder in SYSTEM:
        place = Path(f"{root}{folder}")
        if os.path.islink(folder):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(os.readlink(folder))
        elif os.path.isdir(folder):
            place.mkdir(parents=True)
    for name in settings():
        place = root / "etc" / name
        if os.path.isdir(f"/etc/{name}"):
            place.mkdir()
        else:
            os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_RDONLY, 0o644))
