"""An ordinary user's processes that make boxes of each kind: unshare and bubblewrap are this machine's; Apptainer is
that of a newer Debian release (`python -m tools.cluster root`), whose /usr such a process has in a mount namespace of
its own.

Invariant: nothing of that namespace is left when the process ends.
"""

from __future__ import annotations

import subprocess

from tests.support.able import require
from tests.support.second_user import PYTHON, SecondUser, make_user
from tools.cluster import roots

#: $1 is the release's root, $2 the user, $3 its group, and the rest the command; a chroot is no place for namespaces
_ENTER = """
root=$1; user=$2; group=$3; shift 3
mount --rbind "$root" "$root"
for place in /tmp /work /proc /dev /sys /usr/bin/python3 /usr/bin/python3.11 /usr/lib/python3.11 /etc/passwd /etc/group
do if [ -e "$place" ] && [ -e "$root$place" ]; then mount --rbind "$place" "$root$place"; fi; done
cd "$root" && pivot_root . mnt && umount -l /mnt && cd /tmp || exit 99
exec setpriv --reuid="$user" --regid="$group" --clear-groups "$@"
"""
KINDS = ("unshare", "bwrap", "apptainer")


def user_of(kind: str) -> SecondUser:
    """An account whose processes can make boxes of a kind; skips the test where there is none."""
    require("account_namespaces")
    user = make_user()
    if kind == "unshare":
        return user
    if kind == "bwrap":
        require("bwrap")
        return user
    require("apptainer")
    suite = roots.SUITES[-1]
    root = roots.path(suite)
    roots.prepare(suite)
    (root / "work").mkdir(exist_ok=True)
    return _InNamespace(user.uid, user.gid, user.started, ["sh", "-c", _ENTER, "enter", str(root)])


class _InNamespace(SecondUser):
    """The account, whose processes begin in a mount namespace that a shell has put together."""

    def __init__(self, uid: int, gid: int, started: list[subprocess.Popen[str]], shell: list[str]) -> None:
        super().__init__(uid, gid, started)
        self._shell = shell

    def start(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        words = ["unshare", "--mount", "--propagation", "private", *self._shell]
        words += [str(self.uid), str(self.gid), PYTHON, "-I", "-c", program, *arguments]
        made = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        self.started.append(made)
        return made
