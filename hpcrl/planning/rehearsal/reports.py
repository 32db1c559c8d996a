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
        host: most bytes at once of large tensors in host memory.
        calls: of its groups, in order.
        parts: what its model runs with.
        error: why it could not take its step, and where; "" if it could.
        hint: what to do.
        unshown: whether that is a limit of the rehearsal, and nothing that a run would refuse.
    """

    rank: int
    stage: int = 0
    peaks: dict[str, int] = {}
    host: int = 0
    calls: list[GroupCall] = []
    parts: str = ""
    error: str = ""
    hint: str = ""
    unshown: bool = False


class EngineChoices(msgspec.Struct):
    """What vLLM chooses for an engine on H100s.

    Attributes:
        attention: backends of its layers.
        experts, exchange: kernel and all-to-all of its experts; "" without, or where nothing is exchanged.
        graphs, captured: CUDA graph mode, and the batch sizes that are captured.
        batched, sequences: tokens and sequences of one pass at most.
        workspace: bytes of the experts' kernel, by vLLM's shapes.
        weights: bytes on the first GPU.
        token_bytes: of one token in the KV cache of a GPU.
        all_experts, reached: of a layer, and those that random tokens go to while its weights are empty.
        no_nvcc: whether its environment leads to no nvcc that DeepGEMM, which it uses, compiles with.
        no_flashinfer: the tools whose absence turns FlashInfer off.
    """

    attention: str = ""
    experts: str = ""
    exchange: str = ""
    graphs: str = ""
    captured: tuple[int, ...] = ()
    batched: int = 0
    sequences: int = 0
    workspace: int = 0
    weights: int = 0
    token_bytes: float = 0.0
    all_experts: int = 0
    reached: int = 0
    no_nvcc: bool = False
    no_flashinfer: tuple[str, ...] = ()


class EngineReport(msgspec.Struct):
    """What vLLM says of an engine.

    Attributes:
        tensor, pipeline, data: parallel sizes, as vLLM has them.
        longest: tokens of a request at most.
        quantization: "" for none.
        choices: for its GPUs; None where `unshown` says why it has none.
        absent: why vLLM could not be asked; "" if it was.
        error, hint: what it refuses, and the flags that it is about.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    longest: int = 0
    quantization: str = ""
    choices: EngineChoices | None = None
    unshown: str = ""
    absent: str = ""
    error: str = ""
    hint: str = ""
