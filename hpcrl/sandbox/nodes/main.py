"""The sandbox role: the boxes of one node, for every process of the rollouts.

    python -m hpcrl.sandbox.nodes.main RUN --attempt N --index I [--incarnation K]

Invariants: a node that can make no box says why before the run begins; when this process ends, however, no box is left
and nothing that ran in one (`hpcrl.sandbox.watcher`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from hpcrl.errors import HpcrlError
from hpcrl.run.peers import SandboxPeer, publish
from hpcrl.run.process import die_with_parent
from hpcrl.run.role import RoleContext, act, open_role, say
from hpcrl.sandbox import SandboxPool, Unconfined
from hpcrl.sandbox.nodes.server import SandboxServer
from hpcrl.transport.auth import sandbox_key

NICE = 5  #: boxes give way to engines and trainers of the same node


class _SandboxRole:
    """One incarnation of a node's sandboxes.

    Attributes:
        up: it has served: what ends it from then on is the loss of a node, and no error of the run.
    """

    def __init__(self, context: RoleContext) -> None:
        self.context = context
        self.up = context.incarnation > 0

    def record(self, message: str) -> None:
        if not self.up:
            self.context.rundir.fail("sandbox", self.context.index, message, HpcrlError.__name__)  # as any role's own

    async def serve(self) -> None:
        """Serve until SIGTERM comes.

        Raises:
            HpcrlError: if no box can be made here.
        """
        options, place = self.context.options, self.context.plan.sandboxes[self.context.index]
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        pool = SandboxPool(kind=options.sandbox_kind)
        try:
            await pool.prepare(1)
        except Unconfined as error:
            raise HpcrlError(
                f"host {place.host}: {error.what}", error.hint or "hpcrl doctor there says more"
            ) from error
        incarnation = self.context.incarnation
        server = SandboxServer(sandbox_key(self.context.rundir, self.context.index, incarnation), pool, say)
        port = await server.start(place.at)
        peer = SandboxPeer(host=place.at, port=port, incarnation=incarnation)
        publish(self.context.rundir, peer, self.context.index)
        self.up = True
        say(f"sandboxes of the kind {pool.kind} are served on {place.at}:{port}")
        try:
            await stopped.wait()
        finally:
            done = pool.counts()
            say(f"{done.handed_out} sandboxes were used, {done.lost} lost; {done.seconds:.0f} s in use")
            await server.close()


def main() -> int:
    die_with_parent()
    context = open_role()
    role = _SandboxRole(context)

    def body() -> None:
        os.nice(NICE)
        asyncio.run(role.serve())

    return act("sandbox", context, context.index, body, record=role.record)


if __name__ == "__main__":
    sys.exit(main())
