"""What GPUs have and are rated for, as their makers publish it: memory, and matrix products in BF16 without sparsity.

Invariant: a GPU that is not in the table, or a part of one (MIG), has no rates here: nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.errors import UsageError


@dataclass(frozen=True)
class Card:
    """One kind of GPU.

    Attributes:
        memory: of its data sheet, in GiB as the driver counts it (some 1 % of it is the driver's own).
        tflops: 10^12 operations a second in BF16 with fp32 sums, dense.
        devices: names under which the driver knows it.
        source: the data sheet.
    """

    memory: float
    tflops: float
    devices: tuple[str, ...]
    source: str


CARDS = {
    "a100-40": Card(40.0, 312.0, ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), "NVIDIA A100 data sheet (2021)"),
    "a100-sxm": Card(80.0, 312.0, ("NVIDIA A100-SXM4-80GB",), "NVIDIA A100 data sheet (2021)"),
    "a100-pcie": Card(80.0, 312.0, ("NVIDIA A100 80GB PCIe",), "NVIDIA A100 data sheet (2021)"),
    "h100-sxm": Card(80.0, 989.4, ("NVIDIA H100 80GB HBM3",), "NVIDIA H100 data sheet (2023)"),
    "h100-pcie": Card(80.0, 756.0, ("NVIDIA H100 PCIe",), "NVIDIA H100 PCIe product brief (2022)"),
    "h100-nvl": Card(94.0, 835.5, ("NVIDIA H100 NVL",), "NVIDIA H100 data sheet (2023)"),
    "h200-sxm": Card(141.0, 989.4, ("NVIDIA H200",), "NVIDIA H200 data sheet (2024)"),
    "h200-nvl": Card(141.0, 835.5, ("NVIDIA H200 NVL",), "NVIDIA H200 data sheet (2024)"),
    "gh200-96": Card(96.0, 990.0, ("NVIDIA GH200 480GB",), "NVIDIA GH200 data sheet (2023)"),
    "gh200-144": Card(144.0, 990.0, ("NVIDIA GH200 144G HBM3e",), "NVIDIA GH200 data sheet (2023)"),
    "b200": Card(180.0, 2250.0, ("NVIDIA B200",), "NVIDIA HGX B200 data sheet (2024)"),
    "gb200": Card(186.0, 2500.0, ("NVIDIA GB200",), "NVIDIA GB200 NVL72 data sheet (2024)"),
    "l40s": Card(48.0, 362.0, ("NVIDIA L40S",), "NVIDIA L40S data sheet (2023)"),
}
DEFAULT = "h100-sxm"


def named(name: str) -> Card:
    """The card of `hpcrl plan --gpu NAME`.

    Raises:
        UsageError: names those there are.
    """
    if name not in CARDS:
        raise UsageError(
            f"--gpu {name}: its speed is unknown",
            f"known: {', '.join(sorted(CARDS))}; for another, name the nearest one and give --gpu-memory",
        )
    return CARDS[name]


def of_device(device: str) -> Card | None:
    """The card that the driver calls so; None if it is not in the table."""
    return next((card for card in CARDS.values() if device in card.devices), None)
