"""The device of every rank computes what the CPU does, and the memory that it promises holds what is written into
it."""

from __future__ import annotations

from hpcrl.doctor.selftest.registry import Check, CheckContext, Outcome

SIZE = 512  #: rows and columns of the products
PART = 0.5  #: of the free memory of a GPU, that is written and read back
PIECE = 1 << 30  #: bytes written at a time
CPU_BYTES = 1 << 26


def work(place: CheckContext) -> Outcome:
    """A product in each type against float64, and a pattern over much of the memory."""
    import torch

    generator = torch.Generator().manual_seed(place.rank)
    a, b = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    numbers: dict[str, float | int | str | bool] = {"device": str(place.device)}
    for name, dtype, bound in (("fp32", torch.float32, 2e-3), ("bf16", torch.bfloat16, 2e-2)):
        left = a.to(place.device, dtype)
        right = b.to(place.device, dtype)
        wanted = left.cpu().double() @ right.cpu().double()
        found = (left @ right).cpu().double()
        error = float((found - wanted).norm() / wanted.norm())
        numbers[f"{name}_relative_error"] = error
        if not error < bound:
            return Outcome(
                "failed", f"rank {place.rank}: a product in {name} is {error:.1e} off, {bound:.0e} at most", numbers
            )
    total = CPU_BYTES
    if place.device.type == "cuda":
        properties = torch.cuda.get_device_properties(place.device)
        numbers |= {"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
        total = int(PART * torch.cuda.mem_get_info(place.device)[0])
    pieces = []
    for number in range(max(total // PIECE, 1)):
        values = torch.arange(min(total, PIECE) // 8, dtype=torch.int64, device=place.device)
        pieces.append(values.add_(number << 40))
    for number, values in enumerate(pieces):
        right = torch.arange(len(values), dtype=torch.int64, device=place.device).add_(number << 40)
        if not torch.equal(values, right):
            return Outcome(
                "failed", f"rank {place.rank}: memory of {place.device} does not hold what was written", numbers
            )
    shown = f"{place.world} x {numbers.get('name', 'CPU')}"
    return Outcome("passed", f"{shown}: products right, {total / 2**30:.1f} GiB written and read back", numbers)


CHECK = Check("every device computes and remembers what the CPU does", 10, "ranks", work, ("torch",))
