"""What a host's process sees of a run in the directory that all hosts share.

Invariant: about one call a second and host in a run where nothing happens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from hpcrl.run.rundir import ERROR, OVER, STOP, RunDir

EVERY, SELDOM = 2.5, 5  #: seconds between two looks into the run directory; every how many look for a later attempt


@dataclass
class RunDirPoller:
    """Looks into the run directory, which all hosts share: about one call a second and host in a run where nothing
    happens.

    A whole machine room that asked five times a second would keep its file system from other work.
    """

    rundir: RunDir
    next: float = 0.0
    count: int = 0
    ended: bool = False
    is_over: bool = False
    stopping: bool = False  #: whether the run was asked to save and end

    def _poll(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if now < self.next and not at_once:
            return
        self.next, self.count = now + EVERY, self.count + 1
        signs = self.rundir.signs()
        if ERROR in signs:
            self.rundir.check()
        self.is_over = OVER in signs
        self.stopping = STOP in signs
        self.ended = "end" in signs or (self.count % SELDOM == 0 and self.rundir.superseded())

    def must_end(self) -> bool:
        """Whether this host is to end now.

        Raises:
            PeerError: if the attempt has failed somewhere.
        """
        self._poll()
        return self.ended

    def over(self, at_once: bool) -> bool:
        """Whether the trainer has summed up.

        Args:
            at_once: a host whose own roles have ended does not wait for the next look.
        """
        self._poll(at_once)
        return self.is_over
