"""One task folder, read: its prompt, the files that go into its box, its image.

images.toml next to the task folders says which image is which directory of this machine:

    "python:3.12-slim" = "/scratch/images/python-3.12"       what docker_image names
    "fix-the-parser" = "images/fix-the-parser"               a task, by its folder or its name: the image that its
                                                             Dockerfile builds; relative to images.toml
    "debian:12" = "system"                                   the programs of the node

Invariants: a task that is read can be run here; what cannot is a DataError that names its file.  Every image that a
task needs is named by the user; none is guessed, built or loaded.  Two readings with one digest are of the same task,
for all that its box or its verifier sees.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import DataError
from hpcrl.sandbox.harbor.task_config import TaskConfig, read_config
from hpcrl.utils.untrusted_files import Damaged, parse_toml, read_given, read_given_bytes

CONFIG = "task.toml"
IMAGES = "images.toml"
SYSTEM = "system"
MOST = 64 << 20  #: bytes of a task's files that are written into a box
_APP = "/app"


@dataclass(frozen=True)
class BoxFile:
    """A file that is written into a box.

    Attributes:
        path: inside.
        mode: its permissions.
    """

    path: str
    data: bytes
    mode: int


@dataclass(frozen=True)
class HarborTask:
    """A task that can be run here.

    Attributes:
        instruction: the prompt.
        image: "system", or the absolute path of an image.
        workdir: an absolute path inside, where commands begin.
        files: the environment's.
        tests: the verifier's, below /tests.
        digest: SHA-256 of all of it.
    """

    name: str
    folder: Path
    config: TaskConfig
    instruction: str
    image: str
    workdir: str
    files: tuple[BoxFile, ...]
    tests: tuple[BoxFile, ...]
    digest: str


def is_task(folder: Path) -> bool:
    """Whether a directory is a task folder."""
    return (folder / CONFIG).is_file()


def read_images(directory: Path) -> dict[str, str]:
    """Image or task -> "system" or an absolute path; none without a file.

    Raises:
        DataError: if the file is no such table, or a path leads nowhere.
    """
    path = directory / IMAGES
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


def read_task(folder: Path, images: dict[str, str]) -> HarborTask:
    """The task in a folder.

    Args:
        images: of `read_images`.

    Raises:
        DataError: if it cannot be run here, and why.
    """
    for name, hint in (
        ("steps", "tasks of several steps are not run; make a task of each"),
        ("trajectory.json", "a task begins with its instruction alone; leave it out"),
        ("environment/docker-compose.yaml", "one sandbox is one container; leave this task out"),
    ):
        if (folder / name).exists():
            raise DataError(f"{folder / name} is not read", hint)
    if ignored := next(folder.glob("**/.harborignore"), None):
        raise DataError(f"{ignored} is not read", "remove the files that it names instead")
    config = read_config(folder / CONFIG)
    instruction = _text(folder / "instruction.md")
    if not instruction.strip():
        raise DataError(f"{folder / 'instruction.md'} is empty", "write the task into it")
    if not (folder / "tests" / "test.sh").is_file():
        raise DataError(f"{folder / 'tests' / 'test.sh'} is not here", "it makes the task's verdict")
    image, workdir, files = _environment(folder, config, images)
    tests = _files_below(folder / "tests", "/tests")
    digest = hashlib.sha256()
    seen = [_text(folder / CONFIG), instruction, image, workdir]
    seen += [f"{file.path} {file.mode}" for file in files + tests]
    for part in (*(text.encode() for text in seen), *(file.data for file in files + tests)):
        digest.update(len(part).to_bytes(8, "big") + part)
    return HarborTask(folder.name, folder, config, instruction, image, workdir, files, tests, digest.hexdigest())


def solution(task: HarborTask) -> tuple[BoxFile, ...]:
    """The files of its solution/, none without solve.sh."""
    folder = task.folder / "solution"
    return _files_below(folder, "/solution") if (folder / "solve.sh").is_file() else ()


def _environment(folder: Path, config: TaskConfig, images: dict[str, str]) -> tuple[str, str, tuple[BoxFile, ...]]:
    """(image, working directory, files) of a task; where there is a Dockerfile, the image has its files."""
    named = config.environment.docker_image or folder.name
    own = images.get(folder.name) or images.get(str(config.task.get("name")))
    image = own or images.get(named)
    if image is None:
        raise DataError(
            f"{folder}: no directory is named for the image {named}",
            f"build that image elsewhere, unpack it (apptainer build --sandbox DIR IMAGE), and write "
            f'"{named}" = "DIR" into {folder.parent / IMAGES}',
        )
    usual = _APP if image == SYSTEM or os.path.isdir(image + _APP) else "/work"
    workdir = config.environment.workdir or usual
    if own or (folder / "environment" / "Dockerfile").exists():
        return image, workdir, ()
    return image, workdir, _files_below(folder / "environment", workdir)


def _files_below(folder: Path, target: str) -> tuple[BoxFile, ...]:
    """Every file below a directory, as it is to lie below `target` in a box.

    Raises:
        DataError: for links and what else is no regular file, and for more than MOST bytes.
    """
    found, size = [], 0
    for place in sorted(folder.rglob("*")):
        if place.is_dir() and not place.is_symlink():
            continue
        if place.is_symlink() or not place.is_file():
            raise DataError(f"{place} is no regular file", "links are not followed: put the file itself there")
        path = posixpath.join(target, place.relative_to(folder).as_posix())
        try:
            data, mode = read_given_bytes(place, MOST), 0o755 if place.stat().st_mode & 0o100 else 0o644
        except OSError as error:
            raise DataError(f"{place} cannot be read: {error.strerror or error}") from error
        found.append(BoxFile(path, data, mode))
        size += len(data)
        if size > MOST:
            raise DataError(f"{folder} holds more than {MOST:,} bytes", f"put them into an image ({IMAGES})")
    return tuple(found)


def _text(path: Path) -> str:
    try:
        return read_given(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
