"""The part of an engine on a host other than its server's: workers without a server, started, watched and ended.

    python -m hpcrl.engine.follower RUN --attempt N --index I --node K

Invariant: as in `hpcrl.engine.main`: a part that ends too early is an error that names engine, part and
host, and ends the attempt, as the engine cannot continue without it.
"""

from __future__ import annotations

import argparse
import sys

from hpcrl.engine.main import POLL, EngineSupervisor, supervise
from hpcrl.engine.multi_node import variables
from hpcrl.report.timeline.spans import Timeline
from hpcrl.run.peers import MeetingPeer, wait_for
from hpcrl.run.process import adopt_orphans, die_with_parent
from hpcrl.run.role import RoleContext, act, open_role, say


class Follower(EngineSupervisor):
    """One part of an engine, from joining the first part to its end."""

    def __init__(self, context: RoleContext, node: int) -> None:
        super().__init__(context)
        self.node = node
        self.place = context.plan.engine_nodes(context.index)[node]
        self.name = f"engine {context.index}, part {node} on {self.place.host}"

    def start(self) -> None:
        """Start the workers, once the first part has published its address.

        Raises:
            DeadlineError: names it if it does not.
        """
        peer = wait_for(self.context.rundir, MeetingPeer, self.context.index, self.context.options.engine_start_timeout)
        self.launch(variables(peer, self.node), self.node)
        say(f"{self.name} has begun; it meets {peer.host}:{peer.port}")

    def wait_until_up(self) -> None:
        """Nothing to do: the first part reports when the engine is up."""

    def publish(self) -> None:
        """The first part publishes the engine."""
        self._keep_code()

    def watch(self) -> None:
        """Return when told to stop.

        Raises:
            PeerError: as soon as the workers have ended.
        """
        while not self.stopped.wait(POLL):
            self._check_child()


def main() -> int:
    die_with_parent()
    adopt_orphans()
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--node", type=int, required=True)
    known, rest = parser.parse_known_args()
    context = open_role(rest)
    return act(
        "engine", context, context.index, lambda: supervise(context, Follower(context, known.node), Timeline(None))
    )


if __name__ == "__main__":
    sys.exit(main())
