"""The transcript of a response: its turns, and what it did in sandboxes.

`Sample.transcript` is plain data, {} of a response of one turn that used no sandbox:

    turns      [mask, characters] of each stretch of the response's text, in order: mask 1 is the policy's, 0 what it
               was told; or [mask, text] where the response is another text than its tokens
    commands   of `sandbox.accounts.Command`, in order of their ends: its fields by name, empty ones left out
    left_out   commands in the middle that are not kept

Invariant: at most MOST bytes of text, cut in the middle; nothing here is trained on, and no reward is shown it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.sample import Sample
from hpcrl.sandbox.accounts import Command, Recording

MOST = 1 << 16  #: bytes of texts of a sample


def turns_of(sample: Sample, tokenizer: Tokenizer) -> dict[str, Any]:
    """`turns` of a sample; {} where the policy has said all of the response."""
    mask = sample.array("loss_mask")
    if mask.all() or not mask.any():
        return {}
    edges = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
    response = sample.array("tokens")[sample.prompt_length :]
    parts = np.split(response, edges)
    masks = [int(part[0]) for part in np.split(mask, edges)]
    texts = [*map(tokenizer.decode_text, parts[:-1]), tokenizer.decode(parts[-1])]
    if "".join(texts) == sample.response:
        return {"turns": [[own, len(text)] for own, text in zip(masks, texts, strict=True)]}
    return {"turns": [[own, text] for own, text in zip(masks, cut_texts(texts, MOST // 2), strict=True)]}


def cut_texts(texts: Sequence[str], most: int) -> list[str]:
    """Texts of at most so many bytes together, without the marks: long ones are cut in their middle."""
    sizes = [len(text.encode(errors="replace")) for text in texts]
    limit = most
    if sum(sizes) > most:  # the largest share that all may have
        rest, limit = most, 0
        for number, size in enumerate(sorted(sizes)):
            limit = rest // (len(sizes) - number)
            if size > limit:
                break
            rest -= size
    return [text if size <= limit else _cut(text, limit) for text, size in zip(texts, sizes, strict=True)]


def _cut(text: str, most: int) -> str:
    data, half = text.encode(errors="replace"), most // 2
    end = data[len(data) - half :] if half else b""
    return f"{data[:half].decode(errors='ignore')} ... {end.decode(errors='ignore')}"


def commands_of(recording: Recording) -> dict[str, Any]:
    """`commands` and `left_out` of what a call has done in sandboxes; {} if that is nothing."""
    found = recording.commands()
    texts = cut_texts([one.command for one in found], MOST // 2)
    commands = [_fields(one._replace(command=text)) for one, text in zip(found, texts, strict=True)]
    if not commands:
        return {}
    return {"commands": commands} | ({"left_out": recording.left_out} if recording.left_out else {})


def _fields(command: Command) -> dict[str, Any]:
    times = {"at": round(command.at, 3), "seconds": round(command.seconds, 3)}
    fields = command._asdict() | times | {"limits": list(command.limits)}
    return {name: value for name, value in fields.items() if value not in (None, [])}
