"""Which kinds of boxes there are, and what one of them needs on this node, made ready once.

Invariant: a kind that cannot be had is refused, with the reason, before a box is asked for.
"""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

from hpcrl.errors import UsageError
from hpcrl.sandbox.images.staging import staged
from hpcrl.sandbox.kinds import runtime
from hpcrl.sandbox.kinds.container_kind import ContainerKind, module_of
from hpcrl.sandbox.run import Unconfined
from hpcrl.utils.plugins import PluginFolder

OURS = "namespaces"
VARIABLE = "HPCRL_SANDBOX_KIND"  #: of the environment: the kind of pools that are told none
FOLDER = PluginFolder(Path(__file__).parent, "start_words")


def kind_names() -> tuple[str, ...]:
    """Every kind, ours first."""
    return (OURS, *FOLDER.names())


def chosen(kind: str | None) -> str:
    """The kind that is asked for: by the argument, or else by the environment.

    Raises:
        UsageError: if there is none of that name.
    """
    name = kind or os.environ.get(VARIABLE) or OURS
    if name not in kind_names():
        where = f"kind={name!r} of a sandbox" if kind else f"{VARIABLE}={name}"
        raise UsageError(where, FOLDER.hint(name, also=(OURS,)))
    return name


@functools.cache
def prepare(name: str) -> ContainerKind | None:
    """What boxes of a kind need, put into the shared directory of this node once; None of ours, which need nothing.

    Raises:
        Unconfined: if the kind cannot be had here.
        HpcrlError: if what it needs cannot be made.
    """
    if name == OURS:
        return None
    if os.getuid() == 0:
        raise Unconfined(
            f"no sandbox of the kind {name} is made for root, who could change the node's devices in it",
            f"run as an ordinary user, or with the kind {OURS}",
        )
    found = module_of(name)
    program = next(filter(None, map(shutil.which, found.PROGRAMS)), None)
    if program is None:
        raise Unconfined(
            f"no sandbox of the kind {name} can be made here: {' or '.join(found.PROGRAMS)} is not installed",
            f"choose another kind: {', '.join(kind_names())}",
        )
    places = (
        staged(f"python-{runtime.runtime_identity()}", runtime.make_runtime, "the sandbox's Python"),
        staged(f"system-{runtime.system_identity()}", runtime.make_system, "the sandbox's root"),
        staged("state", Path.mkdir, "the directory of the sandboxes' program"),
    )
    return ContainerKind(name, os.path.realpath(program), *places[:2], found.is_sized(program), places[2])
