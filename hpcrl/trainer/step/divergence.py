"""The KL between the student's and a teacher's distribution of each row, over a vocabulary that may be cut over TP.

Invariants: a column that pads the vocabulary is no token and takes part in nothing; all TP ranks get the same values;
nothing flows back to the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.nn.functional import pad

if TYPE_CHECKING:
    from hpcrl.trainer.step.token_logprobs import Vocabulary

Direction = Literal["reverse", "forward"]


@dataclass(frozen=True)
class TeacherRows:
    """What a teacher says of the rows of a micro-batch.

    hidden: [r, 1, hidden size], in host memory, what goes into its output layer.  weight: [columns of this rank, hidden
    size], of that layer, on the device.  direction: reverse, KL(student || teacher), or forward, KL(teacher ||
    student).
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    direction: Direction


def divergence(
    logits: torch.Tensor, teacher: torch.Tensor, vocabulary: Vocabulary, temperature: float, direction: Direction
) -> torch.Tensor:
    """[r]: the KL (nats) of each row, both distributions at `temperature`.

    logits, teacher: [r, columns of this rank], any float type, computed in float32 or wider; the gradient flows to
    `logits`.
    """
    return _Divergence.apply(logits, teacher, vocabulary, temperature, direction)


class _Divergence(torch.autograd.Function):
    """With p the student's and q the teacher's softmax of z / T:

    reverse   KL = sum_j p_j (log p_j - log q_j)       d KL / d z_j = p_j (log p_j - log q_j - KL) / T
    forward   KL = sum_j q_j (log q_j - log p_j)       d KL / d z_j = (p_j - q_j) / T
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        teacher: torch.Tensor,
        vocabulary: Vocabulary,
        temperature: float,
        direction: Direction,
    ) -> torch.Tensor:
        _, real = vocabulary.range(logits.size(1))
        student, theirs = _log_softmaxes((logits[:, :real], teacher[:, :real]), vocabulary, temperature)
        p = student.exp()
        if direction == "reverse":
            difference = student.sub_(theirs)
            found = _total((p * difference).sum(1), vocabulary)
            gradient = difference.sub_(found[:, None]).mul_(p)
        else:
            q = theirs.exp()
            found = _total(theirs.sub_(student).mul_(q).sum(1), vocabulary)
            gradient = p.sub_(q)
        ctx.save_for_backward(gradient.div_(temperature))
        ctx.padding = logits.size(1) - real
        ctx.dtype = logits.dtype
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return pad(gradient * grad[:, None], (0, ctx.padding)).to(ctx.dtype), None, None, None, None


def _log_softmaxes(
    both: tuple[torch.Tensor, torch.Tensor], vocabulary: Vocabulary, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-softmax of each over the whole vocabulary, in new tensors, with two all-reduces."""
    dtype = torch.promote_types(both[0].dtype, torch.float32)
    least = torch.finfo(dtype).min
    peaks = torch.stack([x.amax(1).to(dtype) if x.size(1) else x.new_full((len(x),), least, dtype=dtype) for x in both])
    if vocabulary.group is not None:
        dist.all_reduce(peaks, dist.ReduceOp.MAX, group=vocabulary.group)
    found = [torch.sub(x, peak[:, None]).div_(temperature) for x, peak in zip(both, peaks, strict=True)]
    sums = _total(torch.stack([x.exp().sum(1) for x in found]), vocabulary).log_()
    student, teacher = (x.sub_(total[:, None]) for x, total in zip(found, sums, strict=True))
    return student, teacher


def _total(values: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """The sum over the ranks that hold the other columns, in place."""
    if vocabulary.group is not None:
        dist.all_reduce(values, group=vocabulary.group)
    return values
