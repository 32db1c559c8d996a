"""A checkpoint of a model whose state fills most of the GPU is written and read without taking more of it.

On a GPU the model is as large as SHARE of its memory, host memory and the disk allow; where there is none it is small,
and what is shown is that a save and a load of it give the same bits.  It has run on no GPU yet.
"""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

import psutil

from hpcrl.doctor.selftest import trainer_model
from hpcrl.doctor.selftest.checks.large_update import GPU
from hpcrl.doctor.selftest.registry import Check, CheckContext, Number, Outcome, Skip
from hpcrl.doctor.selftest.tiny_model import CONFIG, parameters, write_config

if TYPE_CHECKING:
    import torch

SHARE = 0.6  #: of the GPU, that weights, gradients and the optimizer's state are to take
STATE = 18  #: bytes a parameter of these: 2 + 4 + 12
HOST = 32  #: bytes a parameter that a save and a load take of the host: what is gathered, and what is put together
FILES = 14  #: bytes a parameter of a checkpoint
SPARE = 1 << 30  #: bytes of the GPU that a save or a load may take at most in addition


def layers(free_gpu: float, free_host: float, free_disk: float) -> int:
    """How many layers of GPU the check's model has, at most 0 where not one fits."""
    each, rest = parameters(CONFIG | GPU)
    most = min(SHARE * free_gpu / STATE, 0.8 * free_host / HOST, 0.8 * free_disk / FILES)
    return int((most - rest) // each)


def work(place: CheckContext) -> Outcome:
    import torch

    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.checkpoint import save_load
    from hpcrl.trainer.megatron import model

    gpu = place.device.type == "cuda"
    sizes: dict[str, int] = {}
    if gpu:
        free = torch.cuda.get_device_properties(place.device).total_memory
        found = layers(free, psutil.virtual_memory().available, shutil.disk_usage(place.directory).free)
        if found < 1:
            raise Skip("host memory or the disk is too small for a checkpoint that fills a GPU")
        sizes = {**GPU, "num_hidden_layers": found}
    path = place.directory / "model"
    write_config(path, **sizes)
    options = trainer_model.alone_options(path, gpu)
    policy = model.build(options, parallel_state.initialize(options, torch.distributed.HashStore()))
    _step(policy)
    before = _digest(policy)
    numbers: dict[str, Number] = {"parameters": sum(p.numel() for p in policy.module.parameters())}
    target = place.directory / "checkpoints"
    saved = lambda: save_load.save(policy, policy.ranks, target, save_load.Position(1, 1), "selftest")  # noqa: E731
    numbers |= _measured("save", place.device, saved)
    _step(policy)  # changes weights, their fp32 copies and moments
    after = _digest(policy)
    loaded = lambda: save_load.load_checkpoint(policy, policy.ranks, save_load.step(target, 1), "selftest")  # noqa: E731
    numbers |= _measured("load", place.device, loaded)
    shutil.rmtree(target, ignore_errors=True)
    if _digest(policy) != before:
        return Outcome("failed", "the weights that were read are not those that were written", numbers)
    _step(policy)
    if _digest(policy) != after:
        return Outcome("failed", "the optimizer's state that was read is not that which was written", numbers)
    return judge(numbers, gpu)


def judge(numbers: dict[str, Number], gpu: bool) -> Outcome:
    """What the numbers come to."""
    shown = f"{numbers['parameters'] / 1e9:.3g} billion parameters: the same bits"  # type: ignore[operator]
    if not gpu:
        return Outcome("passed", shown, numbers)
    parts = [
        f"{name} {numbers[f'{name}_seconds']:.0f} s, {numbers[f'{name}_extra_bytes'] / 2**30:.2f} GiB more of the GPU"  # type: ignore[operator]
        for name in ("save", "load")
    ]
    fits = all(numbers[f"{name}_extra_bytes"] <= SPARE for name in ("save", "load"))  # type: ignore[operator]
    return Outcome("passed" if fits else "failed", "; ".join([shown, *parts]), numbers)


def _step(policy: Any) -> None:
    """The same gradient for the same weights, so the same step for the same state."""
    trainer_model.backward(policy)
    policy.optimizer.step()


def _digest(policy: Any) -> list[float]:
    """A sum of each parameter, weighed by place so that an exchange of two shows."""
    import torch

    found = []
    for parameter in policy.module.parameters():
        flat = parameter.detach().flatten().double()
        found.append(float((flat * torch.linspace(1.0, 2.0, len(flat), device=flat.device, dtype=flat.dtype)).sum()))
    return found


def _measured(name: str, device: torch.device, work: Any) -> dict[str, Number]:
    """Do it; seconds, and on a GPU the bytes at the peak beyond what was there."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    begun = time.monotonic()
    work()
    numbers: dict[str, Number] = {f"{name}_seconds": round(time.monotonic() - begun, 3)}
    if device.type == "cuda":
        numbers[f"{name}_extra_bytes"] = torch.cuda.max_memory_allocated(device) - held
    return numbers


CHECK = Check("a checkpoint takes no more of the GPU than training does", 75, "alone", work, ("torch", "megatron.core"))
