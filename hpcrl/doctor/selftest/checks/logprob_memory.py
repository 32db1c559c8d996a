"""The memory of log-probs and entropy, forward and backward, is that of one piece of rows, not of all logits."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

from hpcrl.doctor.selftest.registry import Check, CheckContext, Number, Outcome

if TYPE_CHECKING:
    import torch

GPU = {"rows": (8 * 1024, 32 * 1024), "vocabulary": 152_064, "hidden": 1024}
CPU = {"rows": (2 * 1024, 8 * 1024), "vocabulary": 4096, "hidden": 32}
PIECES = (
    3.5  #: copies of a piece's logits that are held at once, float32: logits, what softmax keeps, gradient, and slack
)
CHECKED = 32  #: rows compared with float64


def work(place: CheckContext) -> Outcome:
    import torch

    from hpcrl.config.options import Options

    sizes = GPU if place.device.type == "cuda" else CPU
    chunk = Options.model_fields["log_probs_chunk_size"].default
    chunk = chunk if chunk > 0 else 1024
    numbers: dict[str, Number] = {"chunk_rows": chunk, "vocabulary": sizes["vocabulary"]}
    bound = (
        4 * sizes["vocabulary"] * (PIECES * chunk + sizes["hidden"])
    )  # with a gradient of the weight on its way to the sum
    peaks = []
    for rows in sizes["rows"]:
        torch.manual_seed(0)
        peak, seconds, error = measure(place.device, rows, sizes["vocabulary"], sizes["hidden"], chunk)
        numbers |= {f"peak_bytes_{rows}": peak, f"seconds_{rows}": seconds, f"relative_error_{rows}": error}
        peaks.append(peak)
        if not error < 1e-4:
            return Outcome("failed", f"{rows} rows: log-probs are {error:.1e} off from float64", numbers)
    shown = ", ".join(f"{rows} rows {peak / 2**20:.0f} MiB" for rows, peak in zip(sizes["rows"], peaks, strict=True))
    if place.device.type == "cuda" and peaks[-1] > bound:
        return Outcome("failed", f"{shown}: more than the {bound / 2**20:.0f} MiB of a piece of {chunk} rows", numbers)
    return Outcome("passed", f"beyond inputs and gradients: {shown} (all logits: {whole(sizes)})", numbers)


def whole(sizes: dict) -> str:
    return f"{4 * sizes['rows'][-1] * sizes['vocabulary'] / 2**20:.0f} MiB"


def measure(device: torch.device, rows: int, vocabulary: int, hidden: int, chunk: int) -> tuple[int, float, float]:
    """(bytes at the peak beyond inputs and their gradients, seconds, largest relative error of some rows'
    log-probs)."""
    import torch

    from hpcrl.trainer.step.token_logprobs import Vocabulary, tokens_of

    states = torch.randn(rows, 1, hidden, device=device, requires_grad=True)
    weight = (0.1 * torch.randn(vocabulary, hidden, device=device)).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,), device=device)
    weight.grad = torch.zeros_like(weight)
    states.grad = torch.zeros_like(states)
    before, begun = _peak(device, restart=True), time.monotonic()
    found = tokens_of(states, labels, lambda h: (h @ weight.T).squeeze(1), Vocabulary(vocabulary), 0.8, chunk)
    (found.logprobs + 0.1 * found.entropy).sum().backward()
    peak, seconds = _peak(device) - before, time.monotonic() - begun
    picked = torch.arange(0, rows, max(rows // CHECKED, 1), device=device)
    with torch.no_grad():
        every = (states[picked, 0].double() @ weight.double().T / 0.8).log_softmax(-1)
        wanted = every.gather(1, labels[picked, None])[:, 0]
        error = float(((found.logprobs[picked].double() - wanted).abs() / wanted.abs()).max())
    return max(peak, 0), round(seconds, 3), error


def _peak(device: torch.device, restart: bool = False) -> int:
    """Bytes: most that were held since `restart` on a GPU; on a CPU the largest resident set of the process so far."""
    import torch

    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    torch.cuda.synchronize(device)
    if restart:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.max_memory_allocated(device)


CHECK = Check("log-probs of long batches need the memory of one piece", 70, "alone", work, ("torch",))
