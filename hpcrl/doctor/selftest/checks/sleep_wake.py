"""An engine that sleeps gives its GPU back, as `hpcrl plan` counts on, and takes no more than before once it is awake.

It needs a GPU: vLLM's CPU build frees nothing.  It has run on no GPU yet.
"""

from __future__ import annotations

from hpcrl.doctor.selftest.checks.large_update import GPU
from hpcrl.doctor.selftest.registry import Check, CheckContext, Number, Outcome, Skip
from hpcrl.doctor.selftest.tiny_model import make_model
from hpcrl.planning.memory.report import ASLEEP

SHARE = 0.5  #: of the GPU, that the engine may take
LEVEL = 2  #: of sleep: weights and cache are dropped
GROWTH = 1 << 30  #: bytes that an engine may hold after it has woken and did not before
GIB = 2**30


def work(place: CheckContext) -> Outcome:
    if place.device.type != "cuda":
        raise Skip("vLLM's CPU build frees nothing when it sleeps")
    import torch
    from vllm.entrypoints.llm import LLM

    def held() -> int:
        """Bytes of the GPU that others than this process hold, now that it holds none of a model."""
        return before - torch.cuda.mem_get_info(place.device)[0]

    model = place.directory / "sleep-model"
    if not (model / "config.json").exists():
        make_model(model, **GPU)
    before = torch.cuda.mem_get_info(place.device)[0]
    engine = LLM(model=str(model), enable_sleep_mode=True, gpu_memory_utilization=SHARE, max_model_len=256)
    numbers: dict[str, Number] = {"awake_bytes": held()}
    engine.sleep(level=LEVEL)
    numbers["asleep_bytes"] = held()
    engine.wake_up(["weights"])
    numbers["weights_bytes"] = held()
    engine.wake_up(["kv_cache"])
    numbers["awake_again_bytes"] = held()
    return judge(numbers)


def judge(numbers: dict[str, Number]) -> Outcome:
    """What the numbers come to."""
    awake, asleep, weights, again = (
        float(numbers[f"{name}_bytes"]) for name in ("awake", "asleep", "weights", "awake_again")
    )
    shown = (
        f"awake {awake / GIB:.2f}, asleep {asleep / GIB:.2f}, with its weights {weights / GIB:.2f}, awake again "
        f"{again / GIB:.2f} GiB"
    )
    if asleep > ASLEEP:
        return Outcome("failed", f"{shown}: hpcrl plan allows {ASLEEP / GIB:.0f} GiB to one that sleeps", numbers)
    if again > awake + GROWTH:
        return Outcome("failed", f"{shown}: more than before it slept", numbers)
    return Outcome("passed", shown, numbers)


CHECK = Check("an engine that sleeps gives its GPU back", 72, "alone", work, ("torch", "vllm"))
