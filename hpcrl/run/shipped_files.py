"""Files beside the code that a user may read and edit: sbatch/, launch/ and sites/ of the repository, also when installed."""

from __future__ import annotations

from pathlib import Path

from hpcrl.errors import HpcrlError

#: in the repository these are links to the folders at its top
SHIPPED = Path(__file__).resolve().parents[1] / "shipped"


def shipped(name: str) -> Path:
    """The path of such a file, such as launch/task.sh.  HpcrlError if the installation lacks it."""
    path = SHIPPED / name
    if not path.exists():
        raise HpcrlError(f"this installation of hpcrl lacks {name}", "install it from its repository anew")
    return path
