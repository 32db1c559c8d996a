"""What Megatron, torch or vLLM say where a run ends, as one error that names the flags it is about.

Invariant: a flag is named only if the failing statement, or what it says, has the setting's name.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

from hpcrl.config.options import Options
from hpcrl.config.setting_names import spell

UNKNOWN = "a run may do well all the same"
LONGEST = 300  #: characters of a message that are shown
NAME = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+")


def explained(error: BaseException, options: Options) -> tuple[str, str]:
    """(what is wrong, what to do)"""
    frames = traceback.extract_tb(error.__traceback__)
    place = next((frame for frame in reversed(frames) if _foreign(frame.filename)), frames[-1] if frames else None)
    text = " ".join(str(error).split())
    statement = place.line or "" if place else ""
    said = text or statement
    where = f" ({_short(place.filename)}:{place.lineno} {place.name})" if place else ""
    who = _foreign(place.filename) if place else ""
    if _ours(error, frames):
        kind = type(error).__name__
        return f"the rehearsal itself cannot go through with it: {kind}: {said[:LONGEST]}{where}", UNKNOWN
    what = f"{who or type(error).__name__} refuses it: {said[:LONGEST]}{where}"
    flags = flags_of(f"{text} {statement}", options)
    return what, f"it is about {', '.join(flags)}" if flags else ""


def _ours(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> bool:
    """Whether the fake device, a stand-in or this machine is at fault, and not the run."""
    fake = type(error).__module__.startswith("torch._subclasses")
    inside = bool(frames) and "/hpcrl/rehearsal/" in frames[-1].filename
    return fake or inside or isinstance(error, MemoryError)


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
