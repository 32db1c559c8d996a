"""Log-prob of each label, entropy of each row and its KL to a teacher's distribution, from hidden states through a
vocabulary that may be split over TP.

Invariants: a column that pads the vocabulary is not a token and takes part in nothing; all TP ranks get the same
values; no gradient flows to the teacher; whatever the number of rows, no more than --log-probs-chunk-size of them have
logits at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from hpcrl.utils.device_copies import to_device


class TokenScores(NamedTuple):
    """Of each row's distribution, [r]: log-prob of the label, entropy (nats), whether the label is the likeliest token,
    and the KL to a teacher where there is one."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    greedy: torch.Tensor
    divergence: torch.Tensor | None = None


@dataclass(frozen=True)
class Vocabulary:
    """Which columns this rank's logits are.

    Attributes:
        size: real tokens; the output layer may have more columns, to divide by TP, and those are not tokens.
        group: the tensor-parallel ranks that hold the other columns, in order; None where this rank holds all.
    """

    size: int
    group: dist.ProcessGroup | None = None

    def range(self, width: int) -> tuple[int, int]:
        """(number of the first of this rank's `width` columns, how many of them are tokens)."""
        first = width * (dist.get_rank(self.group) if self.group is not None else 0)
        return first, min(max(self.size - first, 0), width)


def tokens_of(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    logits: Callable[..., torch.Tensor],
    vocabulary: Vocabulary,
    temperature: float,
    rows: int,
    teacher: TeacherRows | None = None,
) -> TokenScores:
    """`tokens` of logits(hidden), with the `divergence` to a teacher, `rows` rows at a time (0 or less: all at once).

    Args:
        hidden: [r, 1, hidden size].
        labels: int64 [r].
        logits: gives [rows, columns of this rank], under another weight if it is given one. In several pieces none
            keeps its logits: the backward pass computes them again.
    """

    def piece(hidden: torch.Tensor, labels: torch.Tensor, theirs: torch.Tensor | None = None) -> TokenScores:
        own = logits(hidden)
        found = tokens(own, labels, vocabulary, temperature)
        if teacher is None or theirs is None:
            return found
        with torch.no_grad():
            wanted = logits(to_device(theirs, own.device), teacher.weight)
        return found._replace(divergence=divergence(own, wanted, vocabulary, temperature, teacher.direction))

    whole = (hidden, labels) if teacher is None else (hidden, labels, teacher.hidden)
    if rows <= 0 or len(labels) <= rows:
        return piece(*whole)
    pieces = zip(*(column.split(rows) for column in whole), strict=True)
    if torch.is_grad_enabled():
        found = [checkpoint(piece, *parts, use_reentrant=False, preserve_rng_state=False) for parts in pieces]
    else:
        found = [piece(*parts) for parts in pieces]
    return TokenScores(*(None if column[0] is None else torch.cat(column) for column in zip(*found, strict=True)))


def tokens(logits: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary, temperature: float = 1.0) -> TokenScores:
    """Log-prob of each label, entropy and whether the label is likeliest, under softmax(logits / temperature).

    All TP ranks get the same values; gradients flow to the rank's own columns through log-probs and entropy, in one
    backward pass: what was saved for it becomes the gradient, and a second one is torch's error.

    Args:
        logits: [r, columns of this rank], any float type, computed in float32 or wider.
        labels: int64 [r]; r may be 0.
    """
    return TokenScores(*_Softmax.apply(logits, labels, vocabulary, temperature))


class _Softmax(torch.autograd.Function):
    """One pass over the logits and two all-reduces over TP for everything that the losses ask of them.

    With p the softmax of z / T, H its entropy, y the label:
        d log p_y / d z_j = (1[j = y] - p_j) / T        d H / d z_j = -p_j (log p_j + H) / T
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        least = torch.finfo(dtype).min
        first, real = vocabulary.range(logits.size(1))
        # a padding column that took part would change every log-prob
        peak = logits[:, :real].amax(1).to(dtype) if real else logits.new_full((len(logits),), least, dtype=dtype)
        if vocabulary.group is not None:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=vocabulary.group)
        x = torch.sub(logits, peak[:, None])  # in one pass a copy of type `dtype`, which all below changes in place
        if temperature != 1.0:
            x /= temperature
        x[:, real:] = least
        own = (labels >= first) & (labels < first + real)
        index = torch.where(own, labels - first, 0)[:, None]
        label = torch.where(own, x.gather(1, index)[:, 0], 0.0)
        weights = x.exp()
        sums = torch.stack([label, weights.sum(1), x.mul_(weights).sum(1)])
        if vocabulary.group is not None:
            dist.all_reduce(sums, group=vocabulary.group)
        label, total, weighted = sums
        entropy = total.log() - weighted / total
        greedy = label >= 0
        ctx.save_for_backward(weights.div_(total[:, None]), index, own, entropy)
        ctx.temperature = temperature
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(greedy)
        ctx.set_materialize_grads(False)
        return label - total.log(), entropy, greedy

    @staticmethod
    def backward(
        ctx: Any, logprob: torch.Tensor | None, entropy: torch.Tensor | None, _: None
    ) -> tuple[torch.Tensor, None, None, None]:
        p, index, own, value = ctx.saved_tensors
        extra = None
        if entropy is not None:
            extra = torch.xlogy(p, p).addcmul_(p, value[:, None]).mul_(entropy[:, None] / -ctx.temperature)
        scaled = torch.zeros_like(value) if logprob is None else logprob / ctx.temperature
        grad = p.mul_(-scaled[:, None])  # in place, which spares the largest tensor of the step a copy
        grad.scatter_add_(1, index, torch.where(own, scaled, 0.0)[:, None])
        if extra is not None:
            grad += extra
        return grad.to(ctx.dtype), None, None, None


Direction = Literal["reverse", "forward"]


@dataclass(frozen=True)
class TeacherRows:
    """What a teacher says of the rows of a micro-batch.

    Attributes:
        hidden: [r, 1, hidden size], in host memory, what goes into its output layer.
        weight: [columns of this rank, hidden size], of that layer, on the device.
        direction: reverse, KL(student || teacher), or forward, KL(teacher || student).
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    direction: Direction


def divergence(
    logits: torch.Tensor, teacher: torch.Tensor, vocabulary: Vocabulary, temperature: float, direction: Direction
) -> torch.Tensor:
    """[r]: the KL (nats) of each row, both distributions at `temperature`.

    Args:
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
