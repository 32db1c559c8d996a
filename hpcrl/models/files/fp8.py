"""FP8 weights: matrices as float8_e4m3fn times scales, as published checkpoints hold them.

    quantize_block(weight, (128, 128))      a scale for each block; the last ones of a row or column may be smaller
    quantize_channel(weight)                a scale for each row
    quantize_tensor(weight)                 one scale
    quantized(stream, config)               a stream of named tensors, as in a checkpoint with that quantization_config

A scale is the largest absolute value over 448, the largest number of e4m3; with `power_of_two` it is rounded up to a
power of two (ue8m0).  Invariants: with q the exact value of x / scale, the stored number differs from q by at most
|q| / 16 (three bits of mantissa, rounded to nearest), or 2^-10 where |q| < 2^-6 (half a subnormal step), plus the
rounding of the fp32 division (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", table 1); zeros stay zeros;
nothing becomes infinite; the same weights give the same bits on every run, whatever else is in the stream.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from hpcrl.errors import DataError
from hpcrl.models.files.config_json import CONFIG, LINEAR, read_config, read_quantization
from hpcrl.models.files.safetensors_files import listing

Strategy = Literal["block", "channel", "tensor"]
Stream = Iterator[tuple[str, torch.Tensor]]

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  #: of e4m3
SMALLEST = 2.0**-126  #: scale; below, fp32 itself loses bits, and values so small are noughts to any model
BAND = 1 << 22  #: elements that are widened to fp32 at once

STACKED = re.compile(r"\.experts\.\w+_proj(?:_blocks|\.weight)?$")


# ---- numbers


def quantize_block(
    weight: torch.Tensor, block: tuple[int, int] = (128, 128), power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [rows, columns], fp32 scales [ceil(rows / block rows), ceil(columns / block columns)]).

    Raises:
        ValueError: for anything but a matrix of finite floating-point numbers.
    """
    _check(weight)
    rows, columns = weight.shape
    high, wide = block
    quantized = torch.empty_like(weight, dtype=FP8, memory_format=torch.contiguous_format)
    scale = torch.empty(-(-rows // high), -(-columns // wide), dtype=torch.float32, device=weight.device)
    whole = scale.shape[1] * wide
    step = max(1, BAND // (whole * high)) * high
    for start in range(0, rows, step):
        band = weight[start : start + step].float()
        tall = -(-len(band) // high)
        padded = band.new_zeros(tall * high, whole)
        padded[: len(band), :columns] = band
        blocks = padded.view(tall, high, scale.shape[1], wide)
        scales = scales_for(blocks.abs().amax(dim=(1, 3)), power_of_two)
        codes = encode(blocks, scales[:, None, :, None]).view(tall * high, whole)
        quantized[start : start + step] = codes[: len(band), :columns]
        scale[start // high : start // high + tall] = scales
    return quantized, scale


def quantize_channel(weight: torch.Tensor, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [rows, columns], fp32 scales [rows, 1]); errors as `quantize_block`."""
    _check(weight)
    return quantize_block(weight, (1, weight.shape[1]), power_of_two)


def quantize_tensor(weight: torch.Tensor, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [rows, columns], one fp32 scale [1]); errors as `quantize_block`."""
    _check(weight)
    scale = scales_for(weight.abs().amax().float().view(1), power_of_two)
    quantized = torch.empty_like(weight, dtype=FP8, memory_format=torch.contiguous_format)
    step = max(1, BAND // weight.shape[1])
    for start in range(0, len(weight), step):
        quantized[start : start + step] = encode(weight[start : start + step].float(), scale)
    return quantized, scale


def _check(weight: torch.Tensor) -> None:
    if weight.dim() != 2 or not weight.is_floating_point() or weight.element_size() < 2:
        raise ValueError(
            f"{str(weight.dtype).removeprefix('torch.')}{list(weight.shape)} is not a matrix of floating-point numbers"
        )
    if not weight.numel():
        raise ValueError("it is empty")
    if not weight.abs().amax().isfinite():  # amax hands a NaN on
        raise ValueError("it has infinite or undefined numbers")


def scales_for(largest: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """fp32 scales for the largest absolute values; 1 where all are zero."""
    scale = (largest / LARGEST).clamp(min=SMALLEST)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, mantissa in [1/2, 1)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return torch.where(largest > 0, scale, torch.ones_like(scale))


def encode(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn codes of values under scales of a shape that broadcasts."""
    return (values / scale).clamp(-LARGEST, LARGEST).to(FP8)  # the division may round up


# ---- checkpoints


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint holds its linear layers.

    Attributes:
        block: (rows, columns), for strategy block.
        power_of_two: scales of the format ue8m0.
        chosen: the names of the matrices that are quantised, None: those that LINEAR describes.
    """

    strategy: Strategy = "block"
    block: tuple[int, int] = (128, 128)
    power_of_two: bool = False
    chosen: frozenset[str] | None = None

    @property
    def suffix(self) -> str:
        """What the name of a scale ends with."""
        return "weight_scale_inv" if self.strategy == "block" else "weight_scale"

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor is one of the quantised matrices.

        Raises:
            DataError: for experts that are stacked in one tensor.
        """
        if STACKED.search(name) or (len(shape) == 3 and ".experts." in name):
            raise DataError(
                f"{name} holds all experts of a layer in one tensor", "use a checkpoint with one tensor for each expert"
            )
        if self.chosen is not None:
            return name in self.chosen
        return len(shape) == 2 and bool(LINEAR.search(name))

    def scale_name(self, name: str) -> str:
        """model.layers.0.mlp.up_proj.weight -> model.layers.0.mlp.up_proj.weight_scale_inv"""
        return f"{name.removesuffix('weight')}{self.suffix}"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the scales of a matrix of this shape."""
        if self.strategy == "block":
            return (math.ceil(shape[0] / self.block[0]), math.ceil(shape[1] / self.block[1]))
        return (shape[0], 1) if self.strategy == "channel" else (1,)

    def quantize(self, name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scales) of one matrix.

        Raises:
            DataError: names it if it cannot be quantised.
        """
        try:
            if self.strategy == "block":
                return quantize_block(weight, self.block, self.power_of_two)
            by_row = self.strategy == "channel"
            return (quantize_channel if by_row else quantize_tensor)(weight, self.power_of_two)
        except ValueError as error:
            raise DataError(f"{name} cannot be quantised: {error}") from error


def read_scheme(config: Mapping[str, Any] | None, where: str, chosen: frozenset[str] | None = None) -> Scheme | None:
    """The scheme of a config.json's quantization_config; None if there is none.

    Args:
        where: the file, for messages.

    Raises:
        DataError: for a way of quantising that we cannot do on the fly.
    """
    found = read_quantization(config, where)
    return None if found is None else Scheme(**found, chosen=chosen)


def scheme_of(directory: str | Path) -> Scheme | None:
    """The scheme of a Hugging Face directory, which also tells by its scales which matrices are quantised; None: it has
    none.

    Raises:
        DataError: as `read_scheme`.
    """
    scheme = read_scheme(read_config(directory).get("quantization_config"), str(Path(directory) / CONFIG))
    if scheme is None:
        return None
    names = listing(directory).keys()
    scaled = {name.removesuffix(scheme.suffix) + "weight" for name in names if name.endswith(f".{scheme.suffix}")}
    return replace(scheme, chosen=frozenset(scaled & names) or None)


def quantized(stream: Stream, scheme: Scheme | None) -> Stream:
    """The stream as a checkpoint of `scheme` holds it: each matrix that it takes becomes its codes, then its scales.

    Everything else passes as it is, and no more than one tensor is looked at.

    Raises:
        DataError: names a matrix that cannot be quantised.
    """
    if scheme is None:
        yield from stream
        return
    for name, tensor in stream:
        if scheme.takes(name, tuple(tensor.shape)):
            codes, scales = scheme.quantize(name, tensor.detach())
            yield name, codes
            yield scheme.scale_name(name), scales
        else:
            yield name, tensor
