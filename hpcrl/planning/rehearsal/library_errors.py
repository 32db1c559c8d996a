"""What Megatron, torch or vLLM say where a run ends, as one error that names the flags it is about.

Invariant: a flag is named only if the failing statement, or what it says, has the setting's name.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from hpcrl.config.options import Options
from hpcrl.config.passthrough import as_flag
from hpcrl.config.setting_names import spell
from hpcrl.errors import HpcrlError
from hpcrl.planning.fake_libraries import not_stood_in
from hpcrl.planning.rehearsal.reports import RankReport

UNKNOWN = "a run may do well all the same"
STOOD_IN = ("transformer_engine", "deep_ep")  #: packages that have stand-ins
#: what torch and Megatron say where there is no GPU, or no compiler for one
NO_GPU = re.compile(r"not compiled with CUDA|CUDA_HOME|NVIDIA driver|No CUDA GPUs|active drivers?\b")
LONGEST = 300  #: characters of a message that are shown
NAME = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+")


def refused(rank: int, error: BaseException, options: Options) -> RankReport:
    """The report of a rank that could not take its step."""
    if isinstance(error, HpcrlError):
        cause = error.__cause__
        if cause is None or not _lacking(cause):
            return RankReport(rank, error=error.what, hint=error.hint or "")
        error = cause
    what, hint = explained(error, options)
    return RankReport(rank, error=what, hint=hint, unshown=not isinstance(error, MemoryError) and _ours(error, options))


def explained(error: BaseException, options: Options) -> tuple[str, str]:
    """(what is wrong, what to do)"""
    frames = traceback.extract_tb(error.__traceback__)
    place = next((frame for frame in reversed(frames) if _foreign(frame.filename)), frames[-1] if frames else None)
    text = " ".join(str(error).split())
    statement = place.line or "" if place else ""
    said = text or statement
    where = f" ({_short(place.filename)}:{place.lineno} {place.name})" if place else ""
    who = _foreign(place.filename) if place else ""
    if _ours(error, options):
        kind = type(error).__name__
        told = f"the rehearsal itself cannot go through with it: {kind}: {said[:LONGEST]}{where}"
        settings = [as_flag(name, value) for name, value in not_stood_in(options.megatron).items()]
        return told, f"it cannot show {', '.join(settings)}; {UNKNOWN}" if settings else UNKNOWN
    what = f"{who or type(error).__name__} refuses it: {said[:LONGEST]}{where}"
    flags = flags_of(f"{text} {statement}", options)
    return what, f"it is about {', '.join(flags)}" if flags else ""


def _ours(error: BaseException, options: Options) -> bool:
    """Whether the fake device, a stand-in or this machine is at fault, and not the run."""
    frames = traceback.extract_tb(error.__traceback__)
    fake = type(error).__module__.startswith("torch._subclasses")
    inside = bool(frames) and "/hpcrl/planning/" in frames[-1].filename
    unable = inside or bool(not_stood_in(options.megatron)) or "FakeTensor" in str(error)
    return fake or unable or isinstance(error, MemoryError) or _lacking(error)


def _lacking(error: BaseException) -> bool:
    """Whether what was asked for is the GPU, or what a stand-in has not."""
    if NO_GPU.search(str(error)):
        return True
    if isinstance(error, ImportError):
        return (error.name or "").startswith(STOOD_IN)
    if isinstance(error, AttributeError):
        asked = error.obj if isinstance(error.obj, type) or hasattr(error.obj, "__name__") else type(error.obj)
        home = getattr(asked, "__module__", None) or getattr(asked, "__name__", "")
        return home.startswith((*STOOD_IN, "hpcrl.planning."))
    from hpcrl.planning.fake_libraries import te_layers, transformer_engine

    called = re.split(r"[.(]", str(error))[0]
    stood_in = [vars(te_layers), *transformer_engine.MODULES.values()]
    return isinstance(error, TypeError) and any(called in names for names in stood_in)


def flags_of(text: str, options: Options) -> list[str]:
    """The settings that a text names, as they are given."""
    fields = options.model_dump(exclude={"megatron", "vllm"})
    found = []
    for name in dict.fromkeys(NAME.findall(text)):
        if name in options.megatron:
            found.append(f"--{name.replace('_', '-')} {spell(options.megatron[name])}")
        elif name in options.vllm:
            found.append(f"--vllm-{name.replace('_', '-')} {spell(options.vllm[name])}")
        elif name in fields and fields[name] is not None:
            found.append(f"--{name.replace('_', '-')} {spell(fields[name])}")
    return found


def _foreign(path: str) -> str:
    """Whose file it is: Megatron, vLLM; "" for others."""
    if "/megatron/core/" in path:
        return "Megatron"
    return "vLLM" if "/site-packages/vllm/" in path else ""


def _short(path: str) -> str:
    parts = Path(path).parts
    for name in ("megatron", "vllm", "torch", "hpcrl"):
        if name in parts:
            return "/".join(parts[len(parts) - 1 - parts[::-1].index(name) :])
    return Path(path).name
