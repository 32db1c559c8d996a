"""A micro-batch as one packed row of tokens, for one rank; and numbers of tokens between packed rows and whole
responses.

Row t predicts token t + 1 of its sequence, so the log-prob of a response's token p belongs to row p - 1.  Each sequence
is padded only to what the layout needs: a multiple of 2 x CP rows, and the whole to a multiple of TP under sequence
parallelism; never to the longest.  Under CP a rank holds its zig-zag part of every sequence.

A *column* has one number for each response token of the share's samples, in the order of its rows, without prompts.

Invariants: only rows that predict an unmasked response token are listed in `rows`, so that padding and prompts cannot
count anywhere; what is known of a row depends on its own sample alone; packed rows and columns hold the same numbers;
columns are the same on all TP, CP and PP ranks of a data-parallel rank, and 0 at tokens that are not trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hpcrl.errors import DataError
from hpcrl.trainer.megatron.thd import cp_indices
from hpcrl.trainer.parallel_state import Ranks
from hpcrl.trainer.step.routing_replay import Choices, GivenChoices
from hpcrl.trainer.step.token_logprobs import TeacherRows
from hpcrl.transport.share_format import SampleBatch
from hpcrl.utils.device_copies import to_device


@dataclass(frozen=True)
class FurtherTokens:
    """What layers that predict the token after the next see of a micro-batch: t rows, r of them with a label.

    A row's label is the token two behind it, if that is of its own sequence and of loss mask 1.

    Attributes:
        tokens: int64 [t], the token that follows each row's in its sequence, 0 behind the last.
        first: bool [t], the first row of each sequence.
        rows, labels, sample: int64 [r], as those of `Packed`.
    """

    tokens: torch.Tensor
    first: torch.Tensor
    rows: torch.Tensor
    labels: torch.Tensor
    sample: torch.Tensor


@dataclass
class Packed:
    """One micro-batch on one rank: t rows of m samples; r of the rows are trained on.

    Filled in before the optimizer steps, float32 [r], or None where nothing asks for it: old, the old policy's
    log-probs; reference, the reference model's; teacher, what a teacher says of the whole vocabulary (other shapes);
    advantages; a critic's values, before any of its steps, and the returns that it learns. Filled in by its optimizer
    step: trainer, its log-probs under the weights that sampled, as `TokenBatch.trainer`.

    Attributes:
        tokens, positions: int64 [1, t].
        rows: int64 [r], the rows that predict a token of loss mask 1; for each of them.
        labels: int64 [r], the token.
        sample: int64 [r], which of the m samples it belongs to.
        source: int64 [r], which of the share's response tokens it is.
        rollout: float32 [r], the engine's log-prob.
        counts: int64 [m], the mask sum of the response that each sample is of, whatever rank its tokens are on.
        group: int64 [m], in host memory.
        reward: float32 [m].
        bounds: int32 [m + 1], where each sequence ends with its padding, over all CP ranks.
        ends: the same on the host.
        longest: rows of the longest, with padding. r may be 0.
        choices: the experts of the rows that this rank's routers see, as the samples bring them or a pass has recorded
            them.
        further: for layers that predict further tokens; None: none of them is trained.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    labels: torch.Tensor
    sample: torch.Tensor
    source: torch.Tensor
    rollout: torch.Tensor
    counts: torch.Tensor
    group: torch.Tensor
    reward: torch.Tensor
    bounds: torch.Tensor
    ends: tuple[int, ...]
    longest: int
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    teacher: TeacherRows | None = None
    advantages: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    choices: Choices | None = None
    trainer: torch.Tensor | None = None
    further: FurtherTokens | None = None

    @property
    def samples(self) -> int:
        """m, of each of which every CP rank has a part."""
        return len(self.counts)


def check_batch(batch: SampleBatch, vocab_size: int) -> None:
    """Raise DataError for what cannot be trained on: a response without a prompt, a token that the model does not
    have.
    """
    bare = batch.rows["response_length"] >= batch.rows["length"]
    if bare.any():
        row = batch.rows[int(bare.argmax())]
        raise DataError(
            f"sample {row['response_index']} of group {row['group_index']} has no prompt: nothing predicts its first "
            "token"
        )
    if len(batch.tokens) and int(batch.tokens.max()) >= vocab_size:
        raise DataError(
            f"token id {int(batch.tokens.max())} is outside the model's vocabulary of {vocab_size}",
            "use the tokenizer of --hf-checkpoint",
        )


def pack(
    batch: SampleBatch,
    rows: Sequence[int],
    ranks: Ranks,
    sequence_parallel: bool,
    experts: np.ndarray | None = None,
    further: bool = False,
) -> Packed:
    """Pack the samples `rows` of `batch` for this rank.

    Args:
        experts: the ones that the engine chose, [tokens of the batch, layers, experts a token].
        further: with what layers that predict further tokens see.
    """
    rows = np.asarray(rows, np.int64)
    lengths = batch.rows["length"][rows].astype(np.int64)
    padded = _padded(lengths, ranks, sequence_parallel)
    bounds = np.concatenate([[0], np.cumsum(padded)])
    tokens = np.zeros(int(bounds[-1]), np.int64)
    real = _spans(bounds[:-1], lengths)
    of_batch = _spans(batch.token_offsets[rows], lengths)
    tokens[real] = batch.tokens[of_batch]
    routed = np.full(len(tokens), -1)  # which of the batch's tokens a row is
    routed[real] = of_batch
    positions = np.arange(len(tokens)) - np.repeat(bounds[:-1], padded)
    places, sample, source = _trained(batch, rows, bounds[:-1] + lengths)
    columns = [tokens[places + 1], sample, source, batch.rollout_log_probs[source]]
    counts = batch.rows["trained"][rows].astype(np.int64)
    after = _further(tokens, bounds, positions, places, sample) if further else None
    if ranks.cp_size > 1:
        part = cp_indices(bounds.tolist(), ranks.cp_size, ranks.cp_rank).numpy()
        at = np.full(len(tokens), -1)  # which of this rank's rows a row is
        at[part] = np.arange(len(part))
        after = _of_part(after, part, at) if after else None
        kept = at[places] >= 0
        places, *columns = (column[kept] for column in (at[places], *columns))
        tokens = tokens[part]
        positions = positions[part]
        routed = routed[part]
    if sequence_parallel and experts is not None:  # a router sees its TP rank's rows
        routed = np.split(routed, ranks.tp_size)[ranks.tp_rank]
    put = lambda array: to_device(array, ranks.device)  # noqa: E731
    group = torch.from_numpy(batch.rows["group_index"][rows])
    of_rows = put(tokens)[None], put(positions)[None], *map(put, (places, *columns, counts))
    reward = put(batch.rows["reward"][rows].astype(np.float32))
    choices = None if experts is None else GivenChoices(experts, routed)
    return Packed(
        *of_rows,
        group,
        reward,
        put(bounds.astype(np.int32)),
        tuple(bounds.tolist()),
        int(padded.max()),
        choices=choices,
        further=FurtherTokens(*map(put, after)) if after else None,
    )


Columns = tuple[np.ndarray, ...]  #: the fields of `FurtherTokens`


def _further(
    tokens: np.ndarray, bounds: np.ndarray, positions: np.ndarray, places: np.ndarray, sample: np.ndarray
) -> Columns:
    """Of whole sequences.

    Args:
        places: the rows that predict a token of loss mask 1 as the next one.
    """
    following = np.append(tokens[1:], 0)
    following[bounds[1:] - 1] = 0  # what follows the last row of a sequence is of another
    kept = positions[places] > 0  # else the row before is of another
    return following, positions == 0, places[kept] - 1, tokens[places[kept] + 1], sample[kept]


def _of_part(columns: Columns, part: np.ndarray, at: np.ndarray) -> Columns:
    """Of a context-parallel rank.

    Args:
        part: its rows.
        at: the number of each row among them, -1 for none.
    """
    following, first, rows, labels, sample = columns
    kept = at[rows] >= 0
    return following[part], first[part], at[rows[kept]], labels[kept], sample[kept]


def _padded(lengths: np.ndarray, ranks: Ranks, sequence_parallel: bool) -> np.ndarray:
    """Rows of each sequence: a multiple of what CP cuts it into; the last one fills the whole up for TP."""
    multiple = 2 * ranks.cp_size if ranks.cp_size > 1 else 1
    padded = -(-lengths // multiple) * multiple
    if sequence_parallel:
        padded[-1] += -int(padded.sum()) % (multiple * ranks.tp_size)  # every CP rank's part must divide by TP
    return padded


def _trained(batch: SampleBatch, rows: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the response tokens of loss mask 1, each int64 [r]: the row that predicts it, its sample, its place in the
    responses.

    Args:
        ends: where each sample's real tokens end. A sample is a place in `rows`.
    """
    response = batch.rows["response_length"][rows].astype(np.int64)
    source = _spans(batch.response_offsets[rows], response)
    kept = batch.loss_mask[source] != 0
    sample = np.repeat(np.arange(len(rows)), response)[kept]
    return _spans(ends - response - 1, response)[kept], sample, source[kept]


def _spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... of every span, one after another [sum of lengths]."""
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(starts, lengths) + within


def to_columns(micro_batches: Sequence[Packed], rows: Sequence[torch.Tensor], size: int, ranks: Ranks) -> torch.Tensor:
    """float32 [size] from [r] of each micro-batch; collective over CP and PP.

    Args:
        rows: on the last pipeline stage; ignored on the others.
    """
    column = torch.zeros(size, device=ranks.device)
    if ranks.last_stage:
        for packed, values in zip(micro_batches, rows, strict=True):
            column[packed.source] = values.float()
        if ranks.cp_size > 1:  # a token is on one CP rank, the others have 0
            dist.all_reduce(column, group=parallel_state.get_context_parallel_group())
    if ranks.pp_size > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(column, last, group=parallel_state.get_pipeline_model_parallel_group())
    return column


def to_rows(column: torch.Tensor, micro_batches: Sequence[Packed]) -> list[torch.Tensor]:
    """float32 [r] of each micro-batch from a column."""
    return [column[packed.source].float() for packed in micro_batches]
