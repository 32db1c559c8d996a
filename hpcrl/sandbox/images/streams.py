"""Bytes of archives, read forward: no more at a time, or in all, than an honest archive needs.

Invariant: a header that asks for much memory, and data that unpack to more than the bound, end in `DataError`.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import BinaryIO, Protocol

from hpcrl.errors import DataError

AT_ONCE = 32 << 20  #: bytes that one read may ask for: a header of tar that has more is none
PIECE = 1 << 20
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class ByteSource(Protocol):
    """Whatever has bytes."""

    def read(self, size: int, /) -> bytes: ...


class Slice:
    """`size` bytes of a file from `start`, whatever else reads the file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file = file
        self._at = start
        self._end = start + size

    def read(self, size: int, /) -> bytes:
        """The next bytes; b"" at the end.

        Raises:
            DataError: if the file ends before.
        """
        wanted = min(size, self._end - self._at)
        if wanted <= 0:
            return b""
        self._file.seek(self._at)
        data = self._file.read(wanted)
        if not data:
            raise DataError(f"{self._file.name}: the file is cut off", "copy it again")
        self._at += len(data)
        return data


class _Gunzip:
    """What gzip has packed; several members may follow one another."""

    def __init__(self, source: ByteSource, first: bytes) -> None:
        self._source = source
        self._packed = first
        self._inner = zlib.decompressobj(31)
        self._begun = False

    def read(self, size: int, /) -> bytes:
        while True:
            if not self._packed:
                self._packed = self._source.read(PIECE)
            if not self._packed:
                if self._begun:
                    raise DataError("a compressed layer is cut off", "save the image again")
                return b""
            if self._inner.eof:
                self._inner = zlib.decompressobj(31)
            try:
                data = self._inner.decompress(self._packed, size)
            except zlib.error as error:
                raise DataError(f"a compressed layer is damaged: {error}", "save the image again") from error
            self._begun = not self._inner.eof
            self._packed = self._inner.unused_data if self._inner.eof else self._inner.unconsumed_tail
            if data:
                return data


class Forward:
    """An archive's bytes as tarfile reads them: forward, each read of a bounded size.

    Attributes:
        sha256: of all that was read, once `finish` was called.
    """

    def __init__(self, source: ByteSource, most: int) -> None:
        """Read a layer, which gzip may have packed.

        Args:
            most: bytes that it may have, unpacked.

        Raises:
            DataError: if it is packed in a way that is not known here.
        """
        first = source.read(4)
        if first.startswith(_ZSTD):
            raise DataError("a layer is compressed with zstd", "save the image with layers that gzip has compressed")
        self._left = b""
        self._source: ByteSource = source
        if first.startswith(_GZIP):
            self._source = _Gunzip(source, first)
        else:
            self._left = first
        self._most = most
        self._at = 0
        self._hash = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        """`size` bytes, fewer at the end alone.

        Raises:
            DataError: if that is too much at once, or in all.
        """
        if not 0 <= size <= AT_ONCE:
            raise DataError(f"an archive asks for {size:,} bytes at once", f"an honest one needs {AT_ONCE:,} at most")
        pieces = []
        while size > 0:
            data = self._left[:size] or self._source.read(size)
            self._left = self._left[size:] if self._left else b""
            if not data:
                break
            size -= len(data)
            self._at += len(data)
            if self._at > self._most:
                raise DataError(f"an image unpacks to more than {self._most:,} bytes", "no image of that size is taken")
            self._hash.update(data)
            pieces.append(data)
        return b"".join(pieces)

    def tell(self) -> int:
        """How many bytes were read."""
        return self._at

    def seek(self, place: int, _: int = 0, /) -> int:
        """Leave out what lies before `place`.

        Raises:
            DataError: if that was read already.
        """
        if place < self._at:
            raise DataError("an archive leads back to what was read", "save the image again")
        while self._at < place and self.read(min(PIECE, place - self._at)):
            pass
        return self._at

    def finish(self) -> str:
        """Read the rest: the SHA-256 of the whole, in hexadecimal digits."""
        while self.read(PIECE):
            pass
        return self._hash.hexdigest()
