"""attempts/N/error.json: the first error of an attempt, as whoever failed recorded it.

Invariant: one definition for those who write it and those who read it.
"""

from __future__ import annotations

import msgspec

ERROR = "error.json"  #: its name in attempts/N


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What it holds.  role, index: of the process that failed, `launcher` and `host` among them; time: unix time."""

    role: str
    index: int
    message: str
    time: float

    def __str__(self) -> str:
        """For a user: who failed, and why; what the launcher says speaks for itself."""
        return self.message if self.role == "launcher" else f"{self.role}-{self.index}: {self.message}"
