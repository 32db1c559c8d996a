"""Files shipped with the code that a user may read, copy and edit: examples/, hostfiles/, launch/, sbatch/ and sites/
of the repository, also when installed from a wheel.

Invariant: in the repository these are links to the folders at its top, so there is one copy of each.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from hpcrl.errors import HpcrlError

SHIPPED = Path(__file__).resolve().parent / "shipped"


def shipped(name: str) -> Path:
    """The path of such a file, such as launch/task.sh.

    Raises:
        HpcrlError: if the installation lacks it.
    """
    path = SHIPPED / name
    if not path.exists():
        raise HpcrlError(f"this installation of hpcrl lacks {name}", "reinstall it from its repository")
    return path


def copy_hint(missing: str | Path) -> str:
    """How to get at a file that the documents name and that is not here; "" for a file that hpcrl does not bring."""
    folder = Path(missing).parts[0] if len(Path(missing).parts) > 1 else ""
    if folder in ("examples", "hostfiles") and (SHIPPED / folder).is_dir():
        return f"hpcrl brings its own: cp -r {shlex.quote(str(SHIPPED / folder))} ."
    return ""
