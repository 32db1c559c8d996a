"""Who makes the namespaces of a box: a program that a node has for that, and the argument list that it is given.

    unshare     of util-linux, in a script of its other tools: all of an image can be changed, in bounded memory
    bwrap       bubblewrap
    apptainer   or singularity: where users may make no namespaces, but it is installed set-user-ID

All else is the same: the first process (`inside/main.py`) looks at what was made, gives up its rights, loads the
filter of system calls and serves the box; the watcher outside (`watcher.py`) holds the limits.

An image may have no Python, or another C library than the node.  So the first process's interpreter is shown as
/.hpcrl, with its shared libraries and their loader, which is called by its name.

Invariant: of the machine there is in a box what is named here, read-only, and what the caller shows; what can be
written to is memory.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.sandbox.inside.kernel import read_kernel
from hpcrl.sandbox.limits import BoxLimits

SYSTEM_IMAGE = "system"  #: the machine's own programs
#: kind -> its programs, one of which must be there; "auto" tries them in this order
PROGRAMS = {"unshare": ("unshare",), "bwrap": ("bwrap",), "apptainer": ("apptainer", "singularity")}
AUTO = "auto"
VARIABLE = "HPCRL_SANDBOX_KIND"  #: environment variable: the kind of pools that get none
#: where programs and libraries lie
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
#: what programs and libraries read of the system's settings
SETTINGS = (
    *("alternatives", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf", "passwd"),
)
_DEVICES = ("full", "null", "random", "urandom", "zero")
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": "/tmp"}
_WRITTEN = ("work", "tmp")  #: what can be written to
#: the same in a box of SYSTEM_IMAGE, where tasks in Harbor's form write
_OPEN = ("app", "logs", "solution", "tests")
_INSIDE = "/.hpcrl"  #: where the first process's Python is
#: names in an image's root, in whose place a box has something of its own
_OWN = (_INSIDE[1:], "dev", "home", "proc", "root", "run", "sys", *_WRITTEN)
_STANDARD = f"{_INSIDE}/{sys.platlibdir}/python{sys.version_info[0]}.{sys.version_info[1]}"
_PLACE = "/sys"  #: a directory in which a root is put together; nothing outside of that process sees it
_QUIET = "nosuid,nodev"
_PACKAGE = Path(__file__).parents[1]
_SECONDS = 60.0
#: what the first process imports; then the files that are mapped
_ASK = """
import ctypes, json, os, resource, select, signal, socket, struct, time, encodings.idna, encodings.unicode_escape
print(*{line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if ".so" in line}, sep="\\n")
"""
Shown = Sequence[tuple[str, str]]  #: (path inside, file or directory outside), which a box sees read-only


def chosen(kind: str | None) -> str:
    """The kind that is asked for: by the argument, or else by the environment.

    Raises:
        UsageError: if there is none of that name.
    """
    name = kind or os.environ.get(VARIABLE) or AUTO
    if name not in (AUTO, *PROGRAMS):
        where = f"kind={name!r} of a sandbox" if kind else f"{VARIABLE}={name}"
        raise UsageError(where, f"give one of {', '.join((AUTO, *PROGRAMS))}")
    return name


def refuse_image(image: str, kind: str) -> None:
    """Raise UsageError unless an image is "system", or one that boxes of this kind can be made of."""
    path = Path(image)
    if image == SYSTEM_IMAGE or (
        kind == "apptainer" and path.is_absolute() and path.suffix == ".sif" and path.exists()
    ):
        return
    what = f"the image {image!r} of a sandbox"
    if not path.is_absolute() or not path.is_dir() or path.resolve() == Path("/"):
        raise UsageError(
            f"{what} is no directory of {os.uname().nodename}",
            'give "system", or the absolute path of an unpacked root directory (apptainer build --sandbox makes one)',
        )
    if not any(os.path.lexists(path / name) for name in ("bin", "usr")):
        raise UsageError(f"{what} is a directory without bin and usr", "give the root directory of an unpacked image")
    if os.path.lexists(path / "etc/ld.so.preload"):
        raise UsageError(f"{what} has libraries loaded into every program", f"remove {path}/etc/ld.so.preload")


def box_words(kind: str, image: str, limits: BoxLimits, shown: Shown = ()) -> list[str]:
    """The command line of a kind's program that runs the first process of a box; {talk} and {watcher} stand for numbers
    of sockets.

    Raises:
        HpcrlError: if the program is not here, or makes no boxes for this user.
    """
    program = next(filter(None, map(shutil.which, PROGRAMS[kind])), None)
    if program is None:
        raise HpcrlError(f"{kind}: {' or '.join(PROGRAMS[kind])} is not installed")
    if kind != "unshare" and os.getuid() == 0:
        raise HpcrlError(f"{kind}: none is made for root, who could change the node's devices in it")
    return _WORDS[kind](os.path.realpath(program), "" if image == SYSTEM_IMAGE else image, limits, shown)


def in_system(path: str) -> bool:
    """Whether a file lies where every box of SYSTEM_IMAGE sees it."""
    real = os.path.realpath(path)
    return any(real.startswith(f"{folder}/") for folder in map(os.path.realpath, SYSTEM))


# ---- what a box sees


@functools.cache
def _python() -> tuple[tuple[str, str], ...]:
    """(path inside, path outside) of the first process's Python, its libraries, and the modules of `inside/`."""
    program = os.path.realpath(sys.executable)
    words = [sys.executable, "-I", "-S", "-c", _ASK]
    mapped = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout.splitlines()
    loader = next((path for path in mapped if os.path.basename(path).startswith(("ld-", "ld.so"))), "")
    if not loader:
        raise HpcrlError(f"{program} is linked in a way that is not known here")
    needed = {"ld.so": loader}
    for file in (program, *(path for path in mapped if path != loader)):
        words = [loader, "--list", file]
        said = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False).stdout
        for line in said.splitlines():
            name, arrow, path = line.strip().partition(" => ")
            if arrow and path.startswith("/"):
                needed[os.path.basename(name)] = path.rpartition(" (")[0]
    return (
        (f"{_INSIDE}/bin/python3", program),
        (_STANDARD, os.path.realpath(sysconfig.get_path("stdlib"))),
        (f"{_INSIDE}/hpcrl/sandbox/inside", str(_PACKAGE / "sandbox" / "inside")),
        (f"{_INSIDE}/hpcrl/utils/waiting.py", str(_PACKAGE / "utils" / "waiting.py")),
        *((f"{_INSIDE}/so/{name}", os.path.realpath(path)) for name, path in sorted(needed.items())),
    )


def _hidden() -> list[str]:
    """Paths inside of directories that are empty there: packages that lie in Python's own."""
    place = f"{sysconfig.get_path('stdlib')}/site-packages"
    return [f"{_STANDARD}/site-packages"] if os.path.isdir(place) else []


def _first(limits: BoxLimits, old: str = "") -> list[str]:
    """The command line of a box's first process, inside."""
    told = {"limits": limits.of_process(), "old": old, "uid": os.getuid(), "gid": os.getgid()}
    run = f"import sys; sys.path.append('{_INSIDE}'); from hpcrl.sandbox.inside.main import main; main(sys.argv[1:])"
    loader = [f"{_INSIDE}/so/ld.so", "--inhibit-cache", "--library-path", f"{_INSIDE}/so"]
    return [*loader, f"{_INSIDE}/bin/python3", "-ISBc", run, "{talk}", "{watcher}", json.dumps(told)]


def _links(image: str) -> dict[str, str]:
    """path inside -> target, of what is a link in the image's root, or the machine's."""
    places = [f"/{name}" for name in sorted(set(os.listdir(image)) - set(_OWN))] if image else SYSTEM
    return {place: os.readlink(f"{image}{place}") for place in places if os.path.islink(f"{image}{place}")}


def _seen(image: str) -> Iterator[tuple[str, str]]:
    """(path inside, path outside) of what a box sees of the image, or of the machine."""
    if image:
        for name in sorted(set(os.listdir(image)) - set(_OWN)):
            if not os.path.islink(f"{image}/{name}"):
                yield f"/{name}", f"{image}/{name}"
    else:
        yield from ((folder, folder) for folder in SYSTEM if os.path.isdir(folder) and not os.path.islink(folder))
        yield from (
            (f"/etc/{name}", os.path.realpath(f"/etc/{name}")) for name in SETTINGS if os.path.exists(f"/etc/{name}")
        )


# ---- unshare


class _Root:
    """The lines of a script that puts a root together, in the directory `root` where it runs: all places first, each of
    which would take a process otherwise, then what is mounted there."""

    def __init__(self) -> None:
        self._known = []
        for line in read_kernel("/proc/self/mountinfo").splitlines():
            cells = line.split(" ")
            self._known.append((cells[4].encode().decode("unicode_escape"), cells[5].split(",")))
        self.folders: dict[str, None] = {}
        self._files: list[str] = []
        self._mounts: list[str] = []

    def link(self, inside: str, target: str) -> None:
        self.folders[os.path.dirname(inside)] = None
        self._files.append(f"ln -s {shlex.quote(target)} {shlex.quote(f'root{inside}')}")

    def show(self, inside: str, outside: str, options: str = f"ro,{_QUIET}") -> None:
        """Show a file or directory, and what is mounted below it."""
        real, target = os.path.realpath(outside), shlex.quote(f"root{inside}")
        if os.path.isdir(real):
            self.folders[inside] = None
        else:
            self.folders[os.path.dirname(inside)] = None
            self._files.append(f"[ -e {target} ] || : > {target}")
        above = max((place for place, _ in self._known if f"{real}/".startswith(f"{place.rstrip('/')}/")), key=len)
        below = sorted(place for place, _ in self._known if place.startswith(f"{real}/"))
        how = "--rbind" if below else f"-o bind,{self._kept(above, options)}"
        self._mounts.append(f"mount {how} {shlex.quote(real)} {target}")
        for place in (real, *below) if below else ():
            at = shlex.quote(f"root{inside}{place.removeprefix(real)}")
            kept = self._kept(above if place == real else place, options)
            self._mounts.append(f"mount -o remount,bind,{kept} {at}")

    def write(self, name: str) -> None:
        """Let a directory be written to."""
        self.folders[f"/{name}"] = None
        self._mounts.append(f"mkdir layer/{name}; mount --bind layer/{name} root/{name}")

    def _kept(self, place: str, options: str) -> str:
        """And what the mount has already, which no user may take off."""
        had = next(found for known, found in reversed(self._known) if known == place)
        more = (name for name in ("nosuid", "nodev", "noexec") if name in had and name not in options)
        return ",".join([options, *more])

    def lines(self) -> list[str]:
        folders = " ".join(shlex.quote(f"root{folder}") for folder in self.folders)
        return [f"mkdir -p root {folders}", *self._files, *self._mounts]


def _unshare(program: str, image: str, limits: BoxLimits, shown: Shown) -> list[str]:
    every = _Root()  # what is in each root
    for name in _DEVICES:
        every.show(f"/dev/{name}", f"/dev/{name}", "ro,nosuid,noexec")
    for name, target in _LINKS.items():
        every.link(f"/dev/{name}", target)
    for inside, outside in _python():
        every.show(inside, outside)
    fixed = _Root()  # and in one that has no layer
    fixed.folders |= dict.fromkeys(("/proc", "/run", "/home", "/root", "/dev", "/var", _INSIDE))
    for path, target in _links(image).items():
        fixed.link(path, target)
    for inside, outside in _seen(image):
        fixed.show(inside, outside)
    for name in _WRITTEN if image else (*_WRITTEN, *_OPEN):
        fixed.write(name)
    more = _Root()  # after these, for it may lie below /tmp
    for inside, outside in sorted(shown):
        more.show(inside, outside)
    made = [
        *("mount --bind root root", *fixed.lines(), "chmod 1777 layer/tmp", *more.lines()),
        "[ -e root/var/tmp ] || ln -s /tmp root/var/tmp" if not image else "",
        f"layered=; end='mount -o remount,bind,ro,{_QUIET} root'",
    ]
    if image:
        over = " ".join(f"layer/upper/{name}" for name in _OWN)
        layers = "lowerdir=lower,upperdir=layer/upper,workdir=layer/overlay,userxattr"
        made = [
            f"mkdir -p lower layer/overlay {over}; chmod 1777 layer/upper/tmp; mount --bind {shlex.quote(image)} lower",
            f"if mount -t overlay -o {_QUIET},{layers} box root 2> /dev/null; then layered=1; end=",
            f"mount -t tmpfs -o size=64k,mode=755,{_QUIET} box root/dev; else",
            *(*made, "fi"),
        ]
    lines = [
        f"mount -t tmpfs -o size=4m,mode=755,{_QUIET} box {_PLACE}; cd {_PLACE}; mkdir root layer",
        f"mount -t tmpfs -o size={limits.disk},nr_inodes={limits.inodes},mode=755,{_QUIET} box layer",
        *made,
        f"mount -t tmpfs -o size=64k,mode=755,{_QUIET} box root{_INSIDE}; mkdir root{_INSIDE}/old",
        *every.lines(),
        *(f"mount -t tmpfs -o ro,size=4k,{_QUIET} box root{place}" for place in _hidden()),
        f"mount -o remount,bind,ro,{_QUIET} root{_INSIDE}",
        f"mount -t proc -o ro,noexec,{_QUIET} proc root/proc; $end",
        f'cd root; pivot_root . {_INSIDE[1:]}/old; exec "$@" "$layered"',
    ]
    words = [program, "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc"]
    words += ["--uts", "--cgroup", "/bin/sh", "-ec", "umask 022\n" + "\n".join(lines), "sh"]
    return [*words, *_first(limits, f"{_INSIDE}/old")]


# ---- bubblewrap


@functools.cache
def _bounds(program: str) -> bool:
    """Whether it can bound what may be written (bubblewrap 0.7 or later)."""
    done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    return "--size" in done.stdout


def _bwrap(program: str, image: str, limits: BoxLimits, shown: Shown) -> list[str]:
    words = [program, "--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session"]
    for path, target in _links(image).items():
        words += ["--symlink", target, path]
    for inside, outside in _seen(image):
        words += ["--ro-bind", outside, inside]
    words += [] if image else ["--dir", "/var", "--symlink", "/tmp", "/var/tmp"]
    words += ["--proc", "/proc", "--remount-ro", "/proc", "--tmpfs", "/dev"]
    for name in _DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in _LINKS.items():
        words += ["--symlink", target, f"/dev/{name}"]
    words += ["--remount-ro", "/dev"]
    for name in _WRITTEN if image else (*_WRITTEN, *_OPEN):
        words += [*(("--size", str(limits.disk)) if _bounds(program) else ()), "--tmpfs", f"/{name}"]
    for place in ("/home", "/root", "/run"):
        words += ["--dir", place]
    for inside, outside in (*sorted(shown), *_python()):
        words += ["--ro-bind", outside, inside]
    for place in _hidden():
        words += ["--tmpfs", place, "--remount-ro", place]
    return [*words, "--remount-ro", "/", "--chdir", "/work", *_first(limits), ""]


# ---- Apptainer


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    """An empty root, with a place for each thing that a box of SYSTEM_IMAGE sees; gone with this process."""
    made = tempfile.TemporaryDirectory(prefix="hpcrl-root-")
    root = Path(made.name)
    for name in (*_OWN, "etc", "var/tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for path, target in _links("").items():
        (root / path[1:]).symlink_to(target)
    for inside, outside in _seen(""):
        if os.path.isdir(outside):
            (root / inside[1:]).mkdir(parents=True, exist_ok=True)
        else:
            (root / inside[1:]).touch()
    return made


def _apptainer(program: str, image: str, limits: BoxLimits, shown: Shown) -> list[str]:
    words = [program, "--silent", "exec", "--contain", "--cleanenv", "--no-home", "--no-privs", "--no-eval"]
    words += ["--no-init", "--pid", "--ipc", "--uts", "--net", "--network", "none"]
    words += ["--no-mount", "sys,hostfs,bind-paths,cwd,devpts,home"]
    empty = tuple((place, f"{_root().name}/home") for place in _hidden())
    for inside, outside in (*_python(), *empty, *(() if image else _seen("")), *sorted(shown)):
        if set(outside + inside) & set(":,\\"):
            raise UsageError(f"Apptainer takes no path with one of : , and \\ in it: {outside}")
        words += ["--bind", f"{outside}:{inside}:ro"]
    return [*words, "--scratch", "/work", "--pwd", "/work", image or _root().name, *_first(limits), ""]


_WORDS = {"unshare": _unshare, "bwrap": _bwrap, "apptainer": _apptainer}
