"""The oldest groups first: the default."""

from __future__ import annotations

from hpcrl.config.options import Options
from hpcrl.sample import Sample


def choose(options: Options, rollout_id: int, buffer: list[list[Sample]], count: int) -> list[list[Sample]]:
    return buffer[:count]
