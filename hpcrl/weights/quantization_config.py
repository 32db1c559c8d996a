"""What a config.json's quantization_config says of the matrices, as far as a running engine's can be brought to it.

Invariant: no torch; what passes here is what `fp8.Scheme` can do on the fly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from hpcrl.errors import DataError


class Quantization(NamedTuple):
    """strategy: block, channel or tensor; block: (rows, columns), for the first; power_of_two: scales of the format
    ue8m0."""

    strategy: Literal["block", "channel", "tensor"]
    block: tuple[int, int] | None
    power_of_two: bool


def read_quantization(config: Mapping[str, Any] | None, where: str) -> Quantization | None:
    """How matrices are quantised; None if they are not.

    where: the file, for messages.  DataError for a way of quantising that we cannot do on the fly.
    """
    if not config:
        return None
    method = config.get("quant_method")
    fmt = config.get("fmt", "e4m3")
    power = config.get("scale_fmt") == "ue8m0"
    if (
        method == "fp8"
        and fmt == "e4m3"
        and config.get("activation_scheme") == "dynamic"
        and config.get("weight_block_size")
    ):
        high, wide = config["weight_block_size"]
        return Quantization("block", (int(high), int(wide)), power)
    if method == "compressed-tensors" and config.get("format") == "float-quantized":
        groups = list(config.get("config_groups", {}).values())
        weights = groups[0].get("weights", {}) if len(groups) == 1 else {}
        if (
            weights.get("num_bits") == 8
            and weights.get("strategy") in ("channel", "tensor")
            and weights.get("symmetric")
        ):
            return Quantization(weights["strategy"], None, power)
    raise DataError(
        f"{where} has a quantization_config ({method}) that weights cannot be brought to during a run",
        "give a checkpoint of hpcrl convert to-fp8, or one without quantisation",
    )
