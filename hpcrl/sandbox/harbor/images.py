"""images.toml next to the task folders: which image of a task is which directory of this machine.

    "python:3.12-slim" = "/scratch/images/python-3.12"       what docker_image or FROM names
    "fix-the-parser" = "images/fix-the-parser"               a task, by its folder or its name: the image that its
                                                             Dockerfile builds; relative to images.toml
    "debian:12" = "system"                                   the programs of the node

Invariant: every image that a task needs is named by the user; none is guessed, and none is loaded.
"""

from __future__ import annotations

from pathlib import Path

from hpcrl.errors import DataError
from hpcrl.utils.untrusted_files import Damaged, parse_toml, read_given

FILE = "images.toml"
SYSTEM = "system"


def read_images(directory: Path) -> dict[str, str]:
    """Image or task -> "system" or an absolute path; none without a file.

    Raises:
        DataError: if the file is no such table, or a path leads nowhere.
    """
    path = directory / FILE
    if not path.exists():
        return {}
    try:
        found = parse_toml(read_given(path))
    except (OSError, UnicodeDecodeError, Damaged, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    images = {}
    for name, place in found.items():
        if not isinstance(place, str) or not place:
            raise DataError(f"{path}: {name!r} is {place!r}, no path of an image", f'write "{name}" = "/path"')
        images[name] = place if place == SYSTEM else str((directory / place).absolute())
        if place != SYSTEM and not Path(images[name]).exists():
            raise DataError(f"{path}: the image {images[name]} of {name!r} is not here", "unpack it there")
    return images
