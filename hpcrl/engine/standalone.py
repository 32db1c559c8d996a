"""An engine that belongs to no run: it listens on a port that its user names, until it is ended.

    python -m hpcrl.engine.standalone DIR --attempt 0        (from `hpcrl engines serve`)

Invariants: those of an engine of a run (`engine/main.py`); DIR, which is of this engine alone, is removed when it ends;
each time it is served it has another key, so one that was told to who listened in its place opens it no more.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import socket
import sys

from hpcrl.config.rules.layout import ADDRS, KEYS, split_address
from hpcrl.engine.main import EngineSupervisor, supervise
from hpcrl.engine.membership.http import request_json
from hpcrl.engine.multi_node import bound_socket
from hpcrl.errors import UsageError
from hpcrl.report.timeline.spans import NOWHERE
from hpcrl.run.process import adopt_orphans
from hpcrl.run.role import RoleContext, act, open_role, say


class ServedEngine(EngineSupervisor):
    """One server at the address that its plan names as the only external one.  Its directory ends with it, and so it
    keeps no compiled code."""

    keeps_code = False

    def _key_name(self) -> str:
        return secrets.token_hex(16)

    @property
    def listen(self) -> str:
        return self.context.plan.external[0]

    def _bind(self) -> socket.socket:
        host, port = split_address(self.listen)
        try:
            return bound_socket(host, port)
        except OSError as error:
            raise UsageError(
                f"--listen {self.listen}: {error.strerror or error}", "name a free port of this machine"
            ) from error

    def publish(self) -> None:
        # as a run calls the weights with which it begins: hpcrl try brings none of its own
        request_json(
            self.address, "POST", "/update_weight_version", self.context.options.update_timeout, {"new_version": "0"}
        )
        super().publish()
        say(f"a run asks it with {ADDRS} {self.listen} {KEYS} {self.context.rundir.root.parent}")


def run(context: RoleContext) -> None:
    supervise(context, ServedEngine(context), NOWHERE)


def main() -> int:
    adopt_orphans()
    context = open_role()
    for number in (signal.SIGTERM, signal.SIGINT):  # until it is supervised, there is nothing to end
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        return act("engine", context, 0, lambda: run(context), record=lambda _: None)
    finally:
        shutil.rmtree(context.rundir.root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
