"""The root directory of a box: an image that stays as it is, and what is written over it, in bounded memory.

Invariant: nothing is written outside the box's own file system in memory, whose bytes and inodes are bounded together
for all places that can be written to.
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from hpcrl.sandbox import private_root
from hpcrl.sandbox.private_root import make_tmpfs, show
from hpcrl.sandbox.system_calls import BIND, NO_DEVICES, NO_SUID, PRIVATE, RECURSIVE, mount, pivot_root

SYSTEM_IMAGE = "system"  #: the machine's own programs
WORK = "/work"  #: where commands begin, and their home
#: where tasks in Harbor's form write, in a box of SYSTEM_IMAGE
OPEN = ("app", "logs", "solution", "tests")
#: of an image that cannot have a layer over it: what a box has of its own instead
_OWN = ("dev", "home", "proc", "root", "run", "sys", "tmp", "work")
#: what the kernel answers where users may mount no overlay
_NO_OVERLAY = (errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENODEV, errno.EOPNOTSUPP, errno.ENOSYS)


class BoxDisk(NamedTuple):
    """What a box's root directory has become.

    Attributes:
        folder: number of an open directory of the file system that is written to.
        layered: all of the image can be changed, for this box alone; else /work, /tmp, and where the image is
            SYSTEM_IMAGE the places of OPEN, can be written to.
    """

    folder: int
    layered: bool


def enter_box(image: str, most: int, inodes: int) -> BoxDisk:
    """Change to a root for a box; the process is the first of its PID namespace, and its mount namespace is its own.

    Args:
        image: an unpacked root file system, or SYSTEM_IMAGE.
        most: bytes that may be written.

    Raises:
        OSError: if it cannot be put together here.
    """
    place = private_root.place()
    image_folder = -1 if image == SYSTEM_IMAGE else os.open(image, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    mount(None, "/", None, RECURSIVE | PRIVATE)
    make_tmpfs(place, 4 << 20, "755")
    layer, root, lower = (f"{place}/{name}" for name in ("layer", "root", "lower"))
    for folder in (layer, root, lower):
        os.mkdir(folder)
    make_tmpfs(layer, most, "755", inodes)
    if image_folder >= 0:
        mount(f"/proc/self/fd/{image_folder}", lower, None, BIND)
        os.close(image_folder)
    layered = image != SYSTEM_IMAGE and _lay_over(lower, layer, root)
    if not layered:
        mount(root, root, None, BIND)  # what a root is changed to has to be a mount
        _make_fixed(lower if image != SYSTEM_IMAGE else "", layer, root)
    private_root.mount_proc(root)
    number = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    pivot_root(root)
    if not layered:
        private_root.make_root_read_only()
    private_root.empty_standard_input()
    os.chdir(WORK)
    return BoxDisk(number, layered)


def _lay_over(lower: str, layer: str, root: str) -> bool:
    """Mount the image with a layer of its own over it; False where this kernel lets users mount none.

    The directories that a box needs are made in the layer: there they are real directories of this user's, whatever
    the image has in their place.
    """
    upper = f"{layer}/upper"
    for name in ("", *_OWN):
        os.mkdir(f"{upper}/{name}", 0o755)
    os.mkdir(f"{layer}/overlay")  # its own, for files on their way
    os.chmod(f"{upper}/tmp", 0o1777)
    words = f"lowerdir={lower},upperdir={upper},workdir={layer}/overlay,userxattr"
    try:
        mount("overlay", root, "overlay", NO_SUID | NO_DEVICES, words)
    except OSError as error:
        if error.errno not in _NO_OVERLAY:
            raise
        return False
    make_tmpfs(f"{root}/dev", 64 << 10, "755", 64)
    private_root.show_devices(root)
    return True


def _make_fixed(lower: str, layer: str, root: str) -> None:
    """A root that cannot be changed, but for /work, /tmp and, over the machine's own directories, OPEN.

    Args:
        lower: the image; "": the machine's own directories.
    """
    if lower:
        for name in sorted(set(os.listdir(lower)) - set(_OWN)):
            if os.path.islink(f"{lower}/{name}"):
                os.symlink(os.readlink(f"{lower}/{name}"), f"{root}/{name}")
            else:
                show(root, f"/{name}", f"{lower}/{name}")
    else:
        private_root.show_system(root)
    private_root.show_devices(root)
    for name in ("proc", "run", "home", "root", "var"):
        os.makedirs(f"{root}/{name}", exist_ok=name == "var")
    if not os.path.lexists(f"{root}/var/tmp") and not lower:
        os.symlink("/tmp", f"{root}/var/tmp")
    for name, mode in (("work", 0o755), ("tmp", 0o1777), *((name, 0o755) for name in (() if lower else OPEN))):
        os.mkdir(f"{root}/{name}")
        os.makedirs(f"{layer}/{name}", exist_ok=True)
        os.chmod(f"{layer}/{name}", mode)
        mount(f"{layer}/{name}", f"{root}/{name}", None, BIND)
