"""A try of kinds of sandboxes next to an MPI rank, which hears and says meanwhile that it lives.

Invariant: it is a process of its own, which ends with the rank, and leaves nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import psutil

from hpcrl.launch.local import spawn
from hpcrl.launch.roles import GRACE
from hpcrl.run.exit_status import how_it_ended
from hpcrl.run.process import end_processes
from hpcrl.run.scratch import Scratch
from hpcrl.sandbox.nodes.trial import BoxTrial
from hpcrl.utils.untrusted_files import Damaged, read_json


class TrialProcess:
    """The process that makes the boxes, begun at once.

    Args:
        kinds: as of `try_kinds`.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._folder = Scratch("boxes")
        self._file = self._folder.path / "trial.json"
        self._process = spawn([sys.executable, "-m", "hpcrl.sandbox.nodes.trial", str(self._file), *kinds], None)

    def outcome(self) -> BoxTrial | None:
        """What came of it; None as long as it runs."""
        if (status := self._process.poll()) is None:
            return None
        try:
            return read_json(self._file, BoxTrial)
        except (OSError, Damaged):
            return BoxTrial(
                f"the process that was to make a sandbox {how_it_ended(status)}", "hpcrl doctor there says more"
            )
        finally:
            self._folder.remove()

    def end(self) -> None:
        """End it, if it has not ended by itself."""
        if self._process.poll() is None:
            end_processes([psutil.Process(self._process.pid)], GRACE)
        self._folder.remove()
