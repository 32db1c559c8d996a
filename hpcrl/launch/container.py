"""The container that a site runs its processes in: Pyxis (Slurm's plugin over Enroot), CSCS's Container Engine,
Apptainer (or Singularity), Shifter.

Invariant: the command inside is the command outside, word for word, and nothing of it is read by a shell a second time.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hpcrl.errors import UsageError

#: a local file must look like a path to Pyxis, or it is taken for an image of a registry
_PATH = re.compile(r"\.?/")
#: Apptainer, and its elder name, whose command some sites have alone
APPTAINER = ("apptainer", "singularity")
_SCHEME = re.compile(r"[a-z]+://")


class Container(BaseModel):
    """Which image, what is mounted into it, and how it is started."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["none", "pyxis", "container-engine", "apptainer", "singularity", "shifter"] = Field(
        "none", description="who runs it"
    )
    image: str | None = Field(
        None,
        description="file of the image (/x.sqsh, /x.sif), or what the site's tool takes from a registry; of the "
        "Container Engine the environment file, whole path or name",
    )
    mounts: list[str] = Field(
        [], description="SRC, SRC:DST or SRC:DST:ro; absolute; the run directory is mounted anyway"
    )
    mount_home: bool = Field(False, description="mount the home directory")
    workdir: str | None = Field(
        None, pattern="^/", description="directory to start in; None: the image's (Pyxis), ours (Apptainer)"
    )
    writable: bool = Field(False, description="let the image's own files be written to, until the process ends")
    gpus: Literal["nvidia", "amd", "none"] = Field(
        "nvidia", description="drivers that Apptainer brings in: --nv, --rocm"
    )
    modules: list[str] = Field([], description="modules of Shifter, such as gpu")
    args: list[str] = Field([], description="further arguments: of srun (Pyxis, --container-...), of apptainer exec")

    @model_validator(mode="after")
    def _whole(self) -> Container:
        if self.kind == "none":
            fields = Container.model_fields.items()
            if given := [name for name, field in fields if name != "kind" and getattr(self, name) != field.default]:
                raise ValueError(f"{given[0]} has no effect with kind none; say pyxis, apptainer or another")
            return self
        if not self.image:
            raise ValueError(f"kind {self.kind} needs an image")
        if self.kind == "pyxis" and re.search(r"\.sq(sh|uashfs)$", self.image) and not _PATH.match(self.image):
            raise ValueError(f"image {self.image}: Pyxis takes it for a registry's name; begin a path with / or ./")
        if self.kind in APPTAINER and not _PATH.match(self.image) and not _SCHEME.match(self.image):
            raise ValueError(
                f"image {self.image}: begin a path with / or ./, anything else with its scheme (docker://)"
            )
        self._only_where_they_count()
        for mount in self.mounts:
            check_mount(mount)
        for word in self.args:
            if not word.startswith("-"):
                raise ValueError(f"args: {word} is not an option; write --name=value as one word")
        return self

    def _only_where_they_count(self) -> None:
        """Raise ValueError for a key that this kind of container knows nothing of."""
        without = {
            "modules": ("shifter",),
            "gpus": APPTAINER,
            "mounts": ("pyxis", *APPTAINER, "shifter"),
            "mount_home": ("pyxis", *APPTAINER),
            "workdir": ("pyxis", *APPTAINER, "shifter"),
            "writable": ("pyxis", *APPTAINER),
        }
        for name, kinds in without.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                where = " (its environment file has it)" if self.kind == "container-engine" else ""
                raise ValueError(f"{name} has no effect with kind {self.kind}{where}")

    def wrap(
        self, command: list[str], mounts: tuple[str, ...] = (), names: tuple[str, ...] = ()
    ) -> tuple[list[str], list[str]]:
        """(extra srun arguments, command) to run `command` in this container.

        Args:
            mounts: mounted besides the site's.
            names: variables whose values of the host beat the image's (Pyxis; with Apptainer the site sets
                APPTAINERENV_NAME).

        Raises:
            UsageError: for a path that no container can mount.
        """
        if self.kind == "none":
            return [], list(command)
        everything = [*dict.fromkeys((*self.mounts, *mounts))]
        for mount in everything:
            try:
                check_mount(mount)
            except ValueError as error:
                raise UsageError(str(error), "choose another --run-dir, or another place for what it needs") from None
        if self.kind == "pyxis":
            return self._pyxis(everything, names), ["bash", "-c", 'exec "$@"', "bash", *command]
        if self.kind == "container-engine":
            return [f"--environment={self.image}", *self.args], ["bash", "-c", 'exec "$@"', "bash", *command]
        if self.kind in APPTAINER:
            return [], [*self._apptainer(everything), *command]
        return [], [*self._shifter(everything), *command]

    def _pyxis(self, mounts: list[str], names: tuple[str, ...]) -> list[str]:
        # srun looks for the command on the host before the container is there: bash is on both sides
        words = [f"--container-image={self.image}"]
        if mounts:
            # Pyxis wants a destination
            words.append("--container-mounts=" + ",".join(m if ":" in m else f"{m}:{m}" for m in mounts))
        if self.workdir:
            words.append(f"--container-workdir={self.workdir}")
        words.append("--container-mount-home" if self.mount_home else "--no-container-mount-home")
        if self.writable:
            words.append("--container-writable")
        if names:
            words.append("--container-env=" + ",".join(names))
        return [*words, *self.args]

    def _apptainer(self, mounts: list[str]) -> list[str]:
        words = [self.kind, "exec"]
        words += {"nvidia": ["--nv"], "amd": ["--rocm"], "none": []}[self.gpus]
        for mount in mounts:
            words += ["--bind", mount]
        if self.workdir:
            words += ["--pwd", self.workdir]
        if not self.mount_home:
            words.append("--no-home")
        if self.writable:
            words.append("--writable-tmpfs")
        return [*words, *self.args, str(self.image)]

    def _shifter(self, mounts: list[str]) -> list[str]:
        words = ["shifter", f"--image={self.image}"]
        if self.modules:
            words.append(f"--module={','.join(self.modules)}")
        words += [f"--volume={mount if ':' in mount else f'{mount}:{mount}'}" for mount in mounts]
        if self.workdir:
            words.append(f"--workdir={self.workdir}")
        return [*words, *self.args]


def check_mount(mount: str) -> None:
    """Raise ValueError unless it is SRC, SRC:DST or SRC:DST:FLAGS with absolute paths; a comma would begin another
    mount.
    """
    parts = mount.split(":")
    if (
        len(parts) > 3
        or not parts[0].startswith("/")
        or (len(parts) > 1 and not parts[1].startswith("/"))
        or "," in mount
    ):
        raise ValueError(f"mounts: {mount} is not SRC, SRC:DST or SRC:DST:ro with absolute paths and no comma")


def mountable(root: Path) -> str:
    """What to mount for a run directory, or for one of its stages: the directory above where its name has commas,
    since no container takes any."""
    return str(next((path for path in (root, *root.parents[:2]) if "," not in str(path)), root))
