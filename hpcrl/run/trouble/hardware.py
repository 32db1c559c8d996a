"""Whether somebody says that hardware is broken.

Invariant: a host is called broken only for words by which a driver or CUDA says that the hardware is.
"""

from __future__ import annotations

import re

#: what CUDA (cuda-runtime-api, cudaError: ECCUncorrectable, NvlinkUncorrectable, HardwareStackError) and NVIDIA's
#: driver (the Xid errors after which a GPU needs a reset or a replacement) say of hardware
HARDWARE = re.compile(
    r"uncorrectable ECC error|uncorrectable NVLink error|hardware stack error|GPU is lost|fallen off the bus"
    r"|NVRM: Xid \([^)]*\): (?:48|62|63|64|74|79|92|94|95|119|120)\b|double.bit ECC"
)


def hardware_words(text: str) -> str | None:
    """The line that says that hardware is broken, if one does."""
    return next((line.strip()[:200] for line in text.splitlines() if HARDWARE.search(line)), None)
