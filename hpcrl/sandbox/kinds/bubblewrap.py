"""Boxes that bubblewrap makes: where a site lets users make namespaces by it alone, or has it set-user-ID.

Invariant: the root is memory that is read-only in the end; what of the image or the machine is in it is too.
"""

from __future__ import annotations

import os
import subprocess

from hpcrl.sandbox.kinds.container_kind import ContainerKind
from hpcrl.sandbox.kinds.inside import INSIDE, OWN, system_binds
from hpcrl.sandbox.limits import BoxLimits
from hpcrl.sandbox.private_root import DEVICES, LINKS, SYSTEM

PROGRAMS = ("bwrap",)


def is_sized(program: str) -> bool:
    """Whether it can bound what may be written (bubblewrap 0.7 or later)."""
    done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=30, check=False)
    return "--size" in done.stdout


def start_words(kind: ContainerKind, image: str, limits: BoxLimits, command: list[str]) -> list[str]:
    """See `KindModule`."""
    words = [kind.program, "--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session"]
    words += _of_image(image) if image else _of_system()
    words += ["--proc", "/proc", "--remount-ro", "/proc", "--tmpfs", "/dev"]
    for name in DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in LINKS.items():
        words += ["--symlink", target, f"/dev/{name}"]
    words += ["--remount-ro", "/dev"]
    for place in ("/work", "/tmp"):
        words += [*(("--size", str(limits.disk)) if kind.sized else ()), "--tmpfs", place]
    for place in ("/home", "/root", "/run"):
        words += ["--dir", place]
    words += ["--ro-bind", kind.runtime, INSIDE, "--remount-ro", "/", "--chdir", "/work"]
    return [*words, *command]


def _of_system() -> list[str]:
    words = []
    for folder in SYSTEM:
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
    for outside, inside in system_binds():
        words += ["--ro-bind", outside, inside]
    return [*words, "--dir", "/var", "--symlink", "/tmp", "/var/tmp"]


def _of_image(image: str) -> list[str]:
    words = []
    for name in sorted(set(os.listdir(image)) - set(OWN)):
        path = os.path.join(image, name)
        words += (
            ["--symlink", os.readlink(path), f"/{name}"] if os.path.islink(path) else ["--ro-bind", path, f"/{name}"]
        )
    return words
