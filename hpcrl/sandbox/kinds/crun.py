"""Boxes that crun makes, the OCI runtime of Podman: where a site lets users make namespaces by container programs
alone, as AppArmor can be set.  Podman itself is not asked, for what it starts stays when a run ends.

crun is told all in a configuration (config.md, config-linux.md of the OCI runtime specification), a file in memory
that ends with it.  The root is a directory of empty places, made once an image, over which the image's own directories
are mounted, so that nothing is written into an image that has no place for /work.

Invariant: of the machine there is the image, or the directories of "system", each mounted read-only with all below it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from hpcrl.sandbox.kinds.container_kind import ContainerKind
from hpcrl.sandbox.kinds.inside import INSIDE, OWN, VARIABLES, system_binds
from hpcrl.sandbox.limits import BoxLimits

PROGRAMS = ("crun",)
_NAMESPACES = ("user", "pid", "mount", "network", "ipc", "uts", "cgroup")
_RIGHTS = ("bounding", "effective", "permitted", "inheritable", "ambient")
_QUIET = ["nosuid", "nodev"]


def is_sized(program: str) -> bool:
    """It mounts memory of any size."""
    return True


def start_words(kind: ContainerKind, image: str, limits: BoxLimits, command: list[str]) -> list[str]:
    """See `KindModule`."""
    root = _places(kind.state, image) if image else kind.system
    told = _configuration(kind, root, _of_image(image) if image else system_binds(), limits, command)
    file = os.memfd_create("config.json", 0)  # without MFD_CLOEXEC: crun reads it
    os.write(file, json.dumps(told).encode())
    state = os.path.join(kind.state, "crun")
    _tidy(state)
    #: the last two words but one are numbers of open files; crun closes what lies above those that it is to keep
    kept = max(int(word) for word in command[-3:-1]) - 2
    words = [kind.program, "--root", state, "--cgroup-manager=disabled", "run", f"--preserve-fds={kept}"]
    words += ["--bundle", kind.state, "--config", f"/proc/self/fd/{file}"]
    return [*words, f"box-{os.getpid()}-{time.monotonic_ns()}"]


def _configuration(
    kind: ContainerKind, root: str, binds: list[tuple[str, str]], limits: BoxLimits, command: list[str]
) -> dict[str, Any]:
    user, group = os.getuid(), os.getgid()
    memory = [*_QUIET, f"size={limits.disk}", f"nr_inodes={limits.inodes}", "mode=0755"]
    mounts = [
        _mount("/proc", "proc", [*_QUIET, "noexec", "ro"]),
        _mount("/dev", "tmpfs", ["nosuid", "noexec", "ro", "size=64k", "mode=0755"]),
    ]
    mounts += [_mount(place, "tmpfs", memory) for place in ("/work", "/tmp", "/dev/shm")]
    mounts += [
        {"destination": inside, "type": "bind", "source": outside, "options": [*_QUIET, *_bound(outside)]}
        for outside, inside in [*binds, (kind.runtime, INSIDE)]
    ]
    return {
        "ociVersion": "1.0.0",
        "hostname": "sandbox",
        "root": {"path": root, "readonly": True},
        "process": {
            "user": {"uid": user, "gid": group},
            "args": command,
            "env": [f"{name}={value}" for name, value in VARIABLES.items()],
            "cwd": "/work",
            "noNewPrivileges": True,
            "capabilities": {which: [] for which in _RIGHTS},
        },
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": name} for name in _NAMESPACES],
            "uidMappings": [{"containerID": user, "hostID": user, "size": 1}],
            "gidMappings": [{"containerID": group, "hostID": group, "size": 1}],
        },
    }


def _tidy(state: str) -> None:
    """Make crun's directory, and remove what it has left there of boxes whose keeper was killed."""
    os.makedirs(state, exist_ok=True)
    for place in Path(state).glob("box-*"):
        if not os.path.exists(f"/proc/{place.name.split('-')[1]}"):
            shutil.rmtree(place, ignore_errors=True)


def _mount(place: str, kind: str, options: list[str]) -> dict[str, Any]:
    return {"destination": place, "type": kind, "source": kind, "options": options}


def _bound(path: str) -> tuple[str, str]:
    """crun takes files and directories in different words: of these all is read-only that is mounted below."""
    return ("rbind", "rro") if os.path.isdir(path) else ("bind", "ro")


def _of_image(image: str) -> list[tuple[str, str]]:
    """(path outside, path inside) of what lies in an image's root, but for links, which `_places` makes again."""
    paths = [(os.path.join(image, name), f"/{name}") for name in _names(image)]
    return [(path, inside) for path, inside in paths if not os.path.islink(path)]


def _names(image: str) -> list[str]:
    names = sorted(set(os.listdir(image)) - set(OWN))
    if strange := next((name for name in names if not _is_text(name)), None):
        raise OSError(
            errno.EINVAL, f"crun takes no name of another encoding in an image's root: {strange!r} in {image}"
        )
    return names


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def _places(state: str, image: str) -> str:
    """The directory of empty places for what lies in an image's root; made once, under a name of what lies there."""
    found = []
    for name in _names(image):
        path = os.path.join(image, name)
        found.append([name, os.readlink(path) if os.path.islink(path) else "/" if os.path.isdir(path) else ""])
    place = Path(state, f"places-{hashlib.sha256(json.dumps(found).encode()).hexdigest()[:20]}")
    if not place.is_dir():
        part = Path(f"{place}.part-{os.getpid()}-{time.monotonic_ns()}")
        for name in OWN:
            (part / name).mkdir(parents=True)
        for name, what in found:
            if what == "/":
                (part / name).mkdir()
            elif what:
                (part / name).symlink_to(what)
            else:
                (part / name).touch()
        with contextlib.suppress(OSError):  # another was quicker
            part.rename(place)
        shutil.rmtree(part, ignore_errors=True)
    return str(place)
