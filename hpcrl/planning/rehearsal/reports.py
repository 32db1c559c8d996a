"""What a rank's rehearsal found, as its process tells it.

Invariant: nothing of it is run or imported where it is read.
"""

from __future__ import annotations

import msgspec

from hpcrl.planning.rehearsal.collectives import GroupCall


class RankReport(msgspec.Struct):
    """What one rank took.

    Attributes:
        peaks: most bytes at once on its GPU, by phase.
        state: what stays between them.
        host: most bytes at once of large tensors in host memory.
        calls: of its groups, in order.
        parts: what its model runs with.
        error: why it could not take its step, and where; "" if it could.
        hint: what to do.
        unshown: whether that is a limit of the rehearsal, and nothing that a run would refuse.
        seconds: that it took here.
    """

    rank: int
    stage: int = 0
    peaks: dict[str, int] = {}
    state: int = 0
    host: int = 0
    calls: list[GroupCall] = []
    parts: str = ""
    error: str = ""
    hint: str = ""
    unshown: bool = False
    seconds: float = 0.0


class EngineReport(msgspec.Struct):
    """What vLLM's config classes say of an engine.

    Attributes:
        tensor, pipeline, data: parallel sizes, as vLLM has them.
        longest: tokens of a request at most.
        quantization: "" for none.
        left_out: settings that only a machine with GPUs can judge.
        absent: why vLLM could not be asked; "" if it was.
        error, hint: what it refuses, and the flags that it is about.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    longest: int = 0
    quantization: str = ""
    left_out: tuple[str, ...] = ()
    absent: str = ""
    error: str = ""
    hint: str = ""
