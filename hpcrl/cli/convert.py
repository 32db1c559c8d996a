"""`hpcrl convert`: weights from one format to another.

Invariant: a conversion is one module, loaded only when it is named, as torch comes with it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from hpcrl.errors import UsageError
from hpcrl.utils.arguments import declare

#: conversion -> the module whose main(argv) does it
CONVERSIONS = {
    "to-torch-dist": "hpcrl.trainer.checkpoint.to_torch_dist",
    "to-hf": "hpcrl.models.convert.to_hf",
    "to-fp8": "hpcrl.models.convert.to_fp8",
    "merge-lora": "hpcrl.models.convert.adapter",
}


def convert(argv: Sequence[str]) -> int:
    """`hpcrl convert`: weights from one format to another; each conversion has its own flags."""
    declare({}, CONVERSIONS)
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: hpcrl convert WHAT [--help] ...\n\nWHAT: {', '.join(CONVERSIONS)}")
        return 0
    if argv[0] not in CONVERSIONS:
        raise UsageError(f"hpcrl convert {argv[0]}: no such conversion", f"there are {', '.join(CONVERSIONS)}")
    return importlib.import_module(CONVERSIONS[argv[0]]).main(argv[1:])
