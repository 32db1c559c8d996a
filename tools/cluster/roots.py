"""Other releases of Slurm than the machine's: the programs of a whole Debian release, unpacked below a directory.

    python -m tools.cluster root forky       makes it, once (as root; a minute or two, 0.9 GB)

A node of a cluster of that release sees its /usr, /etc and /var/lib (release.py), so that all that it runs is of it:
Slurm, munge, MariaDB, sshd, the MPIs.  A release goes by Debian's name for it, or by the first part of the version of
Slurm that it was made with: what a testing release has moves on.

Invariant: a root that is there is whole, since it was made under another name, and holds what packages.txt names now.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from tools.cluster import packages
from tools.cluster.layout import ROOTS

MACHINE = "machine"  #: the release that is none of these: whatever the machine itself has installed
SUITES = ("trixie", "forky")  #: Debian 13 and the one after it, oldest first
ADDED = ("openssh-client", "libpython3-stdlib", "libexpat1")  #: what there is on any machine with Python
LACKING = ("shellcheck",)  #: used on the machine alone
#: the machine's, also on the nodes of another release
KEPT = (Path("/usr/local"), Path("/etc/passwd"), Path("/etc/group"))
#: what comes from unstable where a release lacks it, with what it uses; a root is whole without
UNSTABLE = ("apptainer", "squashfuse", "squashfs-tools")
#: files that a node has of its own, and a root not yet
MADE = ("etc/hosts", "etc/hostname", "etc/ssh/ssh_config")
SOURCES = Path("/etc/apt")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SECONDS = 240  #: within which a root is made


class RootError(Exception):
    """No root of that release can be had, in one clear line."""


def path(suite: str) -> Path:
    """Where the root of a Debian release is, or would be."""
    return ROOTS / suite


def version(suite: str) -> str | None:
    """Slurm's version in a root, such as 26.05.5; None if there is no root of that release, or an outdated one."""
    root = path(suite)
    try:
        if (root / "packages").read_text().split() != [*_contents(), *_unstable(suite)]:
            return None
        status = (root / "var/lib/dpkg/status").read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    found = re.search(r"^Package: slurmctld\n(?:\S.*\n| .*\n)*?Version: (?:\d+:)?([\d.]+)", status, re.MULTILINE)
    return found.group(1) if found else None


def find(release: str) -> str:
    """The Debian release for its name or the first part of its Slurm's version, "" for the machine's own.

    RootError if there is no root of it here.
    """
    if release == MACHINE:
        return ""
    there = {suite: found for suite in SUITES if (found := version(suite))}
    for suite, found in there.items():
        if suite == release or f"{found}.".startswith(f"{release}."):
            return suite
    known = ", ".join(f"{suite} (Slurm {found})" for suite, found in there.items()) or "none"
    raise RootError(
        f"there is no root of release {release} in {ROOTS}; there are: {known}; "
        f"`python -m tools.cluster root {'|'.join(SUITES)}` makes one, as root"
    )


def interpreter() -> list[Path]:
    """What the interpreter that runs this is made of below /usr, with every name that it goes by there."""
    names = [Path(sys.executable).absolute()]
    while names[-1].is_symlink():
        names.append(names[-1].parent / names[-1].readlink())
    return [
        found
        for found in dict.fromkeys((*names, Path(sysconfig.get_path("stdlib"))))
        if found.is_relative_to("/usr") and not found.is_relative_to("/usr/local")
    ]


def prepare(suite: str) -> Path:
    """The root of a release, with a place for each thing that is mounted into it.

    RootError if it is not here; PermissionError if a place is missing and may not be made.
    """
    root = path(suite)
    for place in (*(root / name for name in MADE), *(root / found.relative_to("/") for found in interpreter())):
        if Path("/", place.relative_to(root)).is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif place.is_symlink() or not place.exists():
            place.unlink(missing_ok=True)
            place.touch()
    return root


def make(suite: str) -> str:
    """Make the root of a Debian release unless it is there.

    Returns Slurm's version in it.  RootError with the reason if it could not be made.
    """
    if suite not in SUITES:
        raise RootError(f"no release {suite}: one of {', '.join(SUITES)}")
    if found := version(suite):
        return found
    if os.geteuid() != 0:
        raise RootError(f"a root of {suite} is made by root alone: sudo python -m tools.cluster root {suite}")
    mirror, keyring = _mirror(), ["--keyring", str(KEYRING)] if KEYRING.exists() else []
    if shutil.which("debootstrap") is None and not packages.install_packages("debootstrap"):
        raise RootError("debootstrap is missing; hint: apt-get install debootstrap")
    ROOTS.mkdir(parents=True, exist_ok=True)
    new = ROOTS / f"{suite}.{os.getpid()}"
    # mounts that it makes below the root end with it
    command = ["timeout", "--kill-after=10", str(SECONDS), "unshare", "--mount"]
    command += ["debootstrap", "--variant=minbase", *keyring, f"--include={','.join(_contents())}", suite, str(new)]
    # an older debootstrap has no script of the name of a newer release: it is made as testing is
    scripts = Path("/usr/share/debootstrap/scripts")
    command += [mirror, *([] if (scripts / suite).exists() else [str(scripts / "testing")])]
    try:
        _run(command, suite)
        if _unstable(suite):
            _add_unstable(new, mirror)
        for useless in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"):
            shutil.rmtree(new / useless, ignore_errors=True)
        (new / "packages").write_text(" ".join([*_contents(), *_unstable(suite)]))
        if version(suite) is None:  # nobody else has made it meanwhile
            shutil.rmtree(path(suite), ignore_errors=True)
            new.rename(path(suite))
    finally:
        shutil.rmtree(new, ignore_errors=True)
    if (found := version(suite)) is None:
        raise RootError(f"the root of {suite} has no slurmctld")
    return found


def main(suite: str) -> int:
    """Make a root and say which Slurm it has; 0."""
    began = time.monotonic()
    if version(suite) is None:
        print(f"unpacking Debian's {suite} into {path(suite)} for its Slurm: a minute or two, 0.9 GB", flush=True)
    print(f"{suite}: Slurm {make(suite)} ({time.monotonic() - began:.0f} s)")
    return 0


def _contents() -> list[str]:
    return [*(name for name in packages.wanted() if name not in LACKING), *ADDED]


def _unstable(suite: str) -> tuple[str, ...]:
    return UNSTABLE if suite == SUITES[-1] else ()


def _mirror() -> str:
    """The mirror of Debian that this machine's apt uses; RootError if it uses none."""
    for file in sorted([*SOURCES.glob("sources.list"), *SOURCES.glob("sources.list.d/*")]):
        for line in file.read_text(errors="replace").splitlines():
            if not line.lstrip().startswith("#") and (found := re.search(r"\bhttps?://\S+/debian/?(?=\s|$)", line)):
                return found.group()
    raise RootError(f"the apt sources in {SOURCES} name no mirror of Debian")


def _add_unstable(root: Path, mirror: str) -> None:
    """Apptainer is in no release: it, and nothing else that could be had of the root's own, comes from unstable."""
    (root / "etc/apt/sources.list.d/unstable.list").write_text(f"deb {mirror} sid main\n")
    (root / "etc/apt/preferences.d/unstable").write_text("Package: *\nPin: release n=sid\nPin-Priority: 100\n")
    # a testing release whose mirror stands still is as good as one that moves
    apt = "apt-get -q -o Acquire::Check-Valid-Until=false"
    script = f"{apt} update && {apt} install --yes --no-install-recommends {' '.join(UNSTABLE)}"
    enter = ["timeout", "--kill-after=10", str(SECONDS), "unshare", "--mount", "chroot", str(root), "sh", "-c", script]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(enter, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()[-1:]
        print(f"{root.name}: no apptainer in this root, so nothing is tried in containers: {' '.join(said)}")


def _run(command: list[str], suite: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if result.returncode == 124:
        raise RootError(f"debootstrap of {suite} took more than {SECONDS} s and was ended")
    if result.returncode:
        said = [line for line in (result.stdout + result.stderr).splitlines() if line.startswith("E:")] or ["nothing"]
        raise RootError(f"debootstrap of {suite} failed: {said[-1]}")
