"""A mount that remembers what it saw, as network file systems do: `python -m tools.cluster.caching_mount SOURCE TARGET
SECONDS`.

TARGET shows SOURCE through FUSE (the kernel's own protocol, version 7.31, over /dev/fuse).  Names, attributes and
absence are remembered by the kernel for SECONDS, listings and contents are not: what another host changes is seen late,
what it adds may be denied by whoever asked for it before.  Prints `ready`; ends with SIGTERM or when TARGET is
unmounted.

Invariant: a request is answered, if only with an error; nothing is written but what SOURCE gets.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
from collections.abc import Callable

from tools.cluster.mounts import mount

HEADER = struct.Struct("<IIQQIIII")
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
LARGEST = 1 << 20
ROOT = 1


class Mount:
    """The requests of one mount, one after another."""

    def __init__(self, source: str, seconds: int) -> None:
        self.seconds = seconds
        self.paths = {ROOT: source}
        self.ids = {source: ROOT}
        self.listings: dict[int, list[os.DirEntry[str]]] = {}
        self.next = ROOT + 1
        self.operations: dict[int, Callable[[int, bytes], bytes | None]] = {
            1: self.lookup, 2: self.forget, 3: self.getattr, 4: self.setattr, 5: self.readlink, 6: self.symlink, 8: self.mknod,
            9: self.mkdir, 10: self.unlink, 11: self.rmdir, 12: self.rename, 13: self.link, 14: self.open, 15: self.read,
            16: self.write, 17: self.statfs, 18: self.release, 20: self.fsync, 25: self.done, 26: self.init, 27: self.opendir,
            28: self.readdir, 29: self.releasedir, 30: self.done, 35: self.create, 36: self.forget, 42: self.forget, 45: self.rename2,
        }  # fmt: skip

    def answer(self, request: bytes) -> bytes | None:
        """The reply to a request; None for those that want none."""
        _, opcode, unique, node, *_ = HEADER.unpack_from(request)
        operation = self.operations.get(opcode)
        try:
            body = operation(node, request[HEADER.size :]) if operation else _fails(errno.ENOSYS)
        except OSError as error:
            return struct.pack("<IiQ", 16, -(error.errno or errno.EIO), unique)
        return None if body is None else struct.pack("<IiQ", 16 + len(body), 0, unique) + body

    # ---- names

    def child(self, node: int, name: bytes) -> str:
        return os.path.join(self.paths[node], os.fsdecode(name.split(b"\0", 1)[0]))

    def entry(self, path: str) -> bytes:
        found = os.lstat(path)
        node = self.ids.get(path)
        if node is None:
            node = self.next
            self.next = self.next + 1
            self.ids[path], self.paths[node] = node, path
        return struct.pack("<QQQQII", node, 0, self.seconds, self.seconds, 0, 0) + self.attributes(found, node)

    def attributes(self, found: os.stat_result, node: int) -> bytes:
        times = [divmod(ns, 10**9) for ns in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
        return ATTRIBUTES.pack(
            node, found.st_size, found.st_blocks, *(t[0] for t in times), *(t[1] for t in times), found.st_mode, found.st_nlink,
            found.st_uid, found.st_gid, found.st_rdev, found.st_blksize, 0,
        )  # fmt: skip

    def moved(self, old: str, new: str) -> None:
        """What was below `old` is below `new` from now on."""
        if (gone := self.ids.pop(new, None)) is not None:
            self.paths[gone] = new + "\0gone"  # still open somewhere: its name is another's
        for path in [path for path in self.ids if path == old or path.startswith(old + "/")]:
            node = self.ids.pop(path)
            self.paths[node] = new + path[len(old) :]
            self.ids[self.paths[node]] = node

    def dropped(self, path: str) -> None:
        if (node := self.ids.pop(path, None)) is not None:
            self.paths[node] = path + "\0gone"

    # ---- requests about names

    def init(self, _: int, body: bytes) -> bytes:
        _, _, ahead, _ = struct.unpack_from("<IIII", body)
        return struct.pack(
            "<IIIIHHIIHHI7I", 7, 31, ahead, 1 << 5, 16, 12, 1 << 17, 1, 0, 0, 0, *[0] * 7
        )  # 1 << 5: big writes

    def forget(self, *_: object) -> None:
        return None

    def done(self, *_: object) -> bytes:
        return b""

    def lookup(self, node: int, body: bytes) -> bytes:
        try:
            return self.entry(self.child(node, body))
        except FileNotFoundError:  # node 0: that it is not there is remembered too
            return struct.pack("<QQQQII", 0, 0, self.seconds, 0, 0, 0) + bytes(ATTRIBUTES.size)

    def getattr(self, node: int, body: bytes) -> bytes:
        flags, _, handle = struct.unpack_from("<IIQ", body)
        found = os.fstat(handle) if flags & 1 else os.lstat(self.paths[node])
        return struct.pack("<QII", self.seconds, 0, 0) + self.attributes(found, node)

    def setattr(self, node: int, body: bytes) -> bytes:
        valid, _, handle, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = struct.unpack_from(
            "<IIQQQQQQIIIIIIII", body
        )
        path = self.paths[node]
        where: int | str = handle if valid & 64 else path
        if valid & 1:
            os.chmod(path, stat.S_IMODE(mode))
        if valid & 6:
            os.chown(path, uid if valid & 2 else -1, gid if valid & 4 else -1, follow_symlinks=False)
        if valid & 8:
            os.truncate(where, size)
        if valid & 0x1B0:
            before = os.stat(where)
            own = (before.st_atime_ns, before.st_mtime_ns)
            given = (atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns)
            if valid & 0x180:
                os.utime(where)
            else:
                os.utime(where, ns=(given[0] if valid & 16 else own[0], given[1] if valid & 32 else own[1]))
        found = os.fstat(handle) if valid & 64 else os.lstat(path)
        return struct.pack("<QII", self.seconds, 0, 0) + self.attributes(found, node)

    def readlink(self, node: int, _: bytes) -> bytes:
        return os.fsencode(os.readlink(self.paths[node]))

    def symlink(self, node: int, body: bytes) -> bytes:
        name, target, *_ = body.split(b"\0")
        os.symlink(os.fsdecode(target), path := self.child(node, name))
        return self.entry(path)

    def link(self, node: int, body: bytes) -> bytes:
        (old,) = struct.unpack_from("<Q", body)
        os.link(self.paths[old], path := self.child(node, body[8:]))
        return self.entry(path)

    def mknod(self, node: int, body: bytes) -> bytes:
        mode, rdev, umask, _ = struct.unpack_from("<IIII", body)
        os.mknod(path := self.child(node, body[16:]), mode & ~umask, rdev)
        return self.entry(path)

    def mkdir(self, node: int, body: bytes) -> bytes:
        mode, umask = struct.unpack_from("<II", body)
        os.mkdir(path := self.child(node, body[8:]), mode & ~umask)
        return self.entry(path)

    def unlink(self, node: int, body: bytes) -> bytes:
        os.unlink(path := self.child(node, body))
        self.dropped(path)
        return b""

    def rmdir(self, node: int, body: bytes) -> bytes:
        os.rmdir(path := self.child(node, body))
        self.dropped(path)
        return b""

    def rename(self, node: int, body: bytes, skip: int = 8) -> bytes:
        (into,) = struct.unpack_from("<Q", body)
        name, new, *_ = body[skip:].split(b"\0")
        old_path = self.child(node, name)
        new_path = self.child(into, new)
        os.rename(old_path, new_path)
        self.moved(old_path, new_path)
        return b""

    def rename2(self, node: int, body: bytes) -> bytes:
        if struct.unpack_from("<I", body, 8)[0]:
            _fails(errno.EINVAL)
        return self.rename(node, body, 16)

    def statfs(self, node: int, _: bytes) -> bytes:
        found = os.statvfs(self.paths[node])
        counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<QQQQQIIII6I", *counts, found.f_bsize, found.f_namemax, found.f_frsize, 0, *[0] * 6)

    # ---- requests about contents

    def open(self, node: int, body: bytes) -> bytes:
        flags, _ = struct.unpack_from("<II", body)
        return struct.pack("<QII", os.open(self.paths[node], flags & ~(os.O_CREAT | os.O_EXCL | os.O_APPEND)), 0, 0)

    def create(self, node: int, body: bytes) -> bytes:
        flags, mode, umask, _ = struct.unpack_from("<IIII", body)
        handle = os.open(path := self.child(node, body[16:]), (flags | os.O_CREAT) & ~os.O_APPEND, mode & ~umask)
        return self.entry(path) + struct.pack("<QII", handle, 0, 0)

    def read(self, _: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(handle, size, offset)

    def write(self, _: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(handle, body[40 : 40 + size], offset), 0)

    def fsync(self, _: int, body: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", body)[0])
        return b""

    def release(self, _: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def opendir(self, node: int, _: bytes) -> bytes:
        handle = self.next
        self.next = self.next + 1
        with os.scandir(self.paths[node]) as found:
            self.listings[handle] = list(found)
        return struct.pack("<QII", handle, 0, 0)

    def readdir(self, _: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        out = b""
        for number, each in enumerate(self.listings[handle][offset:], int(offset) + 1):
            name = os.fsencode(each.name)
            kind = 4 if each.is_dir(follow_symlinks=False) else 10 if each.is_symlink() else 8
            one = struct.pack("<QQII", each.inode(), number, len(name), kind) + name
            one += bytes(-len(one) % 8)
            if len(out) + len(one) > size:
                break
            out += one
        return out

    def releasedir(self, _: int, body: bytes) -> bytes:
        self.listings.pop(struct.unpack_from("<Q", body)[0], None)
        return b""


def _fails(number: int) -> bytes:
    raise OSError(number, os.strerror(number))


def main(source: str, target: str, seconds: str) -> None:
    os.umask(0)
    handle = os.open("/dev/fuse", os.O_RDWR)
    data = f"fd={handle},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    mount("caching", target, "fuse.caching", 0, data)
    served = Mount(os.path.abspath(source), int(seconds))
    libc = ctypes.CDLL(None)
    try:
        print("ready", flush=True)
        while True:
            try:
                reply = served.answer(os.read(handle, LARGEST + 4096))
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                raise
            if reply is not None:
                try:
                    os.write(handle, reply)
                except OSError as error:
                    if error.errno != errno.ENOENT:  # whoever asked is gone
                        raise
    finally:
        libc.umount2(os.fsencode(target), 2)


if __name__ == "__main__":
    main(*sys.argv[1:])
