"""A small file system of a run's own: it can be full, and it can break, as a disk's does that has turned read-only
under open files.

Invariant: whatever could be read of a broken one is there again, with its dates, when it is healed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

MIB = 192  #: twice what a run of the campaign needs


class Disk:
    """ext4 on a loop device at the directory `at`; a tmpfs, which cannot break, where the kernel lends no loop device;
    nothing if not root.

    mounted: whether there is one; breaks: whether it can break.
    """

    def __init__(self, at: Path) -> None:
        self.at = at
        self.images = 0
        own = os.geteuid() == 0 and self._mount(at)
        self.breaks = own and os.access(self._trigger(), os.W_OK)
        tmpfs = ["mount", "-t", "tmpfs", "-o", f"size={MIB}m", "faults", str(at)]
        self.mounted = own or (os.geteuid() == 0 and _done(tmpfs))

    def fill(self) -> Path:
        """Leave not a byte free; the file that does it."""
        free = os.statvfs(self.at)
        filler = self.at / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(free.f_bsize * 16)):
                pass
        return filler

    def break_down(self) -> None:
        """Every write fails with EROFS from now on, to files that are open already too; what was written until now is
        kept."""
        subprocess.run(["fsfreeze", "--freeze", str(self.at)], check=True, timeout=240)
        try:
            self._trigger().write_text("broken")
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(self.at)], check=True, timeout=240)

    def heal(self) -> None:
        """A new file system in place of the broken one, which those who are still in it keep."""
        aside = self.at.with_name(f"{self.at.name}-{self.images}")
        aside.mkdir()
        assert self._mount(aside), f"there is no other loop device for {aside}"
        subprocess.run(["cp", "--archive", f"{self.at}/.", str(aside)], check=True, timeout=240)
        subprocess.run(["umount", "--lazy", str(self.at)], check=True, timeout=240)
        subprocess.run(["mount", "--bind", str(aside), str(self.at)], check=True, timeout=240)
        subprocess.run(["umount", "--lazy", str(aside)], check=True, timeout=240)
        aside.rmdir()

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.at)], check=True, timeout=240)
            self.mounted = False

    def _trigger(self) -> Path:
        """What makes ext4 take its disk for broken (Linux, Documentation/ABI/testing/sysfs-fs-ext4)."""
        number = os.stat(self.at).st_dev
        device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve().name
        return Path(f"/sys/fs/ext4/{device}/trigger_fs_error")

    def _mount(self, at: Path) -> bool:
        """Whether a new image is mounted there.  Its file has no name any more, and goes with the last who is in it."""
        self.images += 1
        image = self.at.with_name(f"image-{self.images}")
        with image.open("wb") as file:
            file.truncate(MIB << 20)
        try:
            made = _done(["mkfs.ext4", "-q", "-m", "0", "-F", str(image)])
            return made and _done(["mount", "-o", "loop,errors=remount-ro", str(image), str(at)])
        finally:
            image.unlink()


def _done(command: list[str]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, timeout=240).returncode == 0
    return False
