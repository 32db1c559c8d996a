"""One task folder, read: its prompt, the files that go into its boxes, its image.

Invariant: a task that is read can be run here; what cannot is a DataError that names its file.  Two readings with one
digest are of the same task, for all that a box of it or its verifier sees.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.errors import DataError
from hpcrl.sandbox.harbor.dockerfile import Dockerfile, read_built, read_dockerfile
from hpcrl.sandbox.harbor.images import FILE, SYSTEM
from hpcrl.sandbox.harbor.task_config import HarborConfig, absolute, carriable, read_config
from hpcrl.utils.untrusted_files import parse_toml, read_given, read_given_bytes

CONFIG = "task.toml"
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
        env: variables of every command.
        files: the environment's, which are in both boxes.
        tests: the verifier's, below /tests.
        digest: SHA-256 of all of it.
    """

    name: str
    folder: Path
    config: HarborConfig
    instruction: str
    image: str
    workdir: str
    env: dict[str, str] = field(default_factory=dict)
    files: tuple[BoxFile, ...] = ()
    tests: tuple[BoxFile, ...] = ()
    digest: str = ""

    @property
    def carried(self) -> tuple[str, ...]:
        """The directories and files of the policy's box that the verdict is made of."""
        named = (absolute(path, self.workdir) for path in self.config.artifacts)
        return (*(() if self.config.separate else (self.workdir,)), "/logs/artifacts", *named)


def is_task(folder: Path) -> bool:
    """Whether a directory is a task folder."""
    return (folder / CONFIG).is_file()


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
        ("environment/.dockerignore", "remove the files that it names instead"),
    ):
        if (folder / name).exists():
            raise DataError(f"{folder / name} is not read", hint)
    if ignored := next(folder.glob("**/.harborignore"), None):
        raise DataError(f"{ignored} is not read", "remove the files that it names instead")
    config = read_config(folder / CONFIG)
    for name in ("tests/Dockerfile", "tests/docker-compose.yaml") if config.separate else ():  # else Harbor has no use
        if (folder / name).exists():
            hint = "the verdict is made in the task's own image: put what it needs there"
            raise DataError(f"{folder / name} is not read", hint)
    instruction = _text(folder / "instruction.md")
    if not instruction.strip():
        raise DataError(f"{folder / 'instruction.md'} is empty", "write what is to be done")
    if not (folder / "tests" / "test.sh").is_file():
        raise DataError(f"{folder / 'tests' / 'test.sh'} is not here", "it makes the task's verdict")
    image, workdir, env, files = _environment(folder, config, images)
    tests = _files_below(folder / "tests", "/tests")
    seen = [image, workdir, *(f"{name}={value}" for name, value in sorted(env.items()))]
    digest = _digest(folder, instruction, seen, (*files, *tests))
    return HarborTask(folder.name, folder, config, instruction, image, workdir, env, files, tests, digest)


def solution(task: HarborTask) -> tuple[BoxFile, ...]:
    """The files of its solution/, none without solve.sh."""
    folder = task.folder / "solution"
    return _files_below(folder, "/solution") if (folder / "solve.sh").is_file() else ()


# ---- the environment


def _environment(
    folder: Path, config: HarborConfig, images: dict[str, str]
) -> tuple[str, str, dict[str, str], tuple[BoxFile, ...]]:
    """(image, working directory, variables, files) of a task."""
    written = folder / "environment" / "Dockerfile"
    own = images.get(folder.name) or images.get(_given_name(folder))
    if own or config.image:
        image = own or _image(folder / CONFIG, config.image, images)
        built, env = read_built(written, config.env) if written.exists() else ("", {})
        workdir = _workdir(config, built, image, written if written.exists() else folder / CONFIG)
        if own or written.exists():
            return image, workdir, env | dict(config.env), ()
        return image, workdir, env | dict(config.env), _files_below(folder / "environment", workdir)
    if not written.is_file():
        raise DataError(f"{folder / CONFIG}: no image", "give docker_image in [environment], or environment/Dockerfile")
    plan = read_dockerfile(written, folder.name, config.env)
    image = _image(written, plan.base, images)
    workdir = _workdir(config, plan.workdir, image, written)
    return image, workdir, plan.env | dict(config.env), tuple(_copied(written.parent, plan))


def _image(where: Path, named: str, images: dict[str, str]) -> str:
    if named not in images:
        raise DataError(
            f"{where}: the image {named} is not known here",
            f'unpack it (docker export) and name its directory in {FILE} next to the tasks: "{named}" = "/path"',
        )
    return images[named]


def _workdir(config: HarborConfig, said: str, image: str, where: Path) -> str:
    """The task's own, or the Dockerfile's; "/" is none to work in."""
    found = config.workdir or (said and absolute(said)).rstrip("/") or usual_workdir(image)
    if not carriable(found):
        raise DataError(
            f"{where}: the working directory {found}",
            "name a directory of the task's own in [environment] workdir: /app",
        )
    return found


def usual_workdir(image: str) -> str:
    """The working directory where none is named: /app, in an image that has it."""
    return _APP if image == SYSTEM or os.path.isdir(image + _APP) else "/work"


def _given_name(folder: Path) -> str:
    """`name` of the file's [task], "" without one."""
    task = parse_toml(read_given(folder / CONFIG)).get("task")
    name = task.get("name") if isinstance(task, dict) else None
    return name if isinstance(name, str) else ""


def _copied(context: Path, plan: Dockerfile) -> Iterator[BoxFile]:
    """The files of every COPY; the Dockerfile itself is among those of `COPY .`, as Docker has it."""
    for sources, target in plan.copies:
        for source in sources:
            place = context / source
            if place.is_dir():
                yield from _files_below(place, target.rstrip("/") or "/")
            else:
                yield _file(place, target + place.name if target.endswith("/") else target)


# ---- files


def _files_below(folder: Path, target: str) -> tuple[BoxFile, ...]:
    """Every file below a directory, as it is to lie below `target` in a box.

    Raises:
        DataError: for links and what else is no regular file, and for more than MOST bytes.
    """
    found, size = [], 0
    for place in sorted(folder.rglob("*")):
        if place.is_dir() and not place.is_symlink():
            continue
        found.append(_file(place, posixpath.join(target, place.relative_to(folder).as_posix())))
        size += len(found[-1].data)
        if size > MOST:
            raise DataError(f"{folder} holds more than {MOST:,} bytes", "put them into an image (images.toml)")
    return tuple(found)


def _file(place: Path, path: str) -> BoxFile:
    if place.is_symlink() or not place.is_file():
        raise DataError(f"{place} is no regular file", "links are not followed: put the file itself there")
    try:
        return BoxFile(path, read_given_bytes(place, MOST), 0o755 if place.stat().st_mode & 0o100 else 0o644)
    except OSError as error:
        raise DataError(f"{place} cannot be read: {error.strerror or error}") from error


def _text(path: Path) -> str:
    try:
        return read_given(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _digest(folder: Path, instruction: str, seen: Sequence[str], files: tuple[BoxFile, ...]) -> str:
    digest = hashlib.sha256()
    parts = [_text(folder / CONFIG), instruction, *seen, *(f"{file.path} {file.mode}" for file in files)]
    for part in (*(part.encode() for part in parts), *(file.data for file in files)):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()
