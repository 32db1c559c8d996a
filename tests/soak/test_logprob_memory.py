"""Log-probs and entropy of 32 768 rows x 152 064 tokens, forward and backward: memory is that of a piece, not of 20 GB
of logits.

    python -m tests.soak.test_logprob_memory CHUNK [ROWS VOCABULARY]     one measurement, as JSON

Invariant: each measurement has a process of its own, whose peak resident set the kernel knows.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time

import pytest

from tests.support.runs import REPO

pytestmark = [pytest.mark.process, pytest.mark.soak]

ROWS = 32 * 1024
VOCABULARY = 152_064
HIDDEN = 32
CHECKED = 64  #: rows that are compared with float64
MIB = 2**20


def measure(chunk: int, rows: int = ROWS, vocabulary: int = VOCABULARY) -> dict[str, float]:
    """Peak MiB beyond what was there before, seconds, and the largest relative errors against float64."""
    import torch

    from hpcrl.trainer.step.token_logprobs import Vocabulary, tokens_of

    torch.manual_seed(0)
    hidden = torch.randn(rows, 1, HIDDEN, requires_grad=True)
    weight = (0.5 * torch.randn(vocabulary, HIDDEN)).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,))
    weight.grad = torch.zeros_like(weight)
    hidden.grad = torch.zeros_like(hidden)
    before, begun = peak(), time.monotonic()
    found = tokens_of(hidden, labels, lambda h: (h @ weight.T).squeeze(1), Vocabulary(vocabulary), 0.8, chunk)
    scale = torch.linspace(0.5, 2, rows)
    ((found.logprobs + 0.1 * found.entropy) * scale).sum().backward()
    row = {"mib": (peak() - before) / MIB, "seconds": time.monotonic() - begun}
    checked = torch.arange(0, rows, rows // CHECKED)
    states = hidden.detach()[checked, 0].double().requires_grad_()
    every = (states @ weight.detach().double().T / 0.8).log_softmax(-1)
    logprobs = every.gather(1, labels[checked, None])[:, 0]
    entropy = -(every.exp() * every).sum(-1)
    ((logprobs + 0.1 * entropy) * scale[checked]).sum().backward()
    pairs = {
        "logprobs": (found.logprobs.detach()[checked], logprobs.detach()),
        "entropy": (found.entropy.detach()[checked], entropy.detach()),
        "gradient": (hidden.grad[checked, 0], states.grad),
    }
    return row | {name: float((a.double() - b).norm() / b.norm()) for name, (a, b) in pairs.items()}


def peak() -> int:
    """Bytes of this process's largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_a_process(*arguments: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.soak.test_logprob_memory", *map(str, arguments)]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # else glibc keeps blocks that were freed, and they count
    return json.loads(
        subprocess.run(command, cwd=REPO, env=env, check=True, capture_output=True, text=True, timeout=3000).stdout
    )


def test_the_peak_is_that_of_a_piece() -> None:
    for rows, chunk in ((ROWS, 512), (1024, 512), (1024, 128), (1024, 1024)):
        found = in_a_process(chunk, rows, VOCABULARY)
        piece = 4 * chunk * VOCABULARY / MIB
        print(f"{rows} rows, {chunk} at once, {piece:.0f} MiB of logits: {json.dumps(found)}")
        assert found["mib"] <= 4 * piece + 250
        assert max(found["logprobs"], found["entropy"]) <= 1e-6 and found["gradient"] <= 1e-5


if __name__ == "__main__":
    print(json.dumps(measure(*map(int, sys.argv[1:]))))
