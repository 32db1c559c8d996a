"""Weights from a Hugging Face directory into the ranks, and out of them again.

Invariants: loading reads every tensor once in all ranks together (hf_reading.py), and every tensor of the files has
exactly one place; export gives back every tensor once, bit for bit what the ranks hold, with one full tensor in memory
at a time.  Nothing is pickled between ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from hpcrl.errors import DataError, HpcrlError
from hpcrl.model_files.safetensors_files import (
    ITEM_BYTES,
    SINGLE,
    Entry,
    SafetensorsDirectory,
    listing,
    read_header,
)
from hpcrl.model_files.stacked_experts import ExpertsApart, single
from hpcrl.models.family import Rule
from hpcrl.models.shared.mtp import is_head, mtp_name
from hpcrl.models.slicing import CUTS, Shapes
from hpcrl.redistribution.layouts import Pattern, held_parts
from hpcrl.trainer.collectives import agree, broadcast_json
from hpcrl.trainer.megatron.hf_reading import LIMIT, Parameter, divide, exchange, host_group, rounds
from hpcrl.trainer.megatron.model import Policy
from hpcrl.trainer.parallel_state import Ranks
from hpcrl.weights.fp8 import Scheme
from hpcrl.weights.from_fp8 import Dequantized, widened
from hpcrl.weights.pieces.elements import OwnTensor
from hpcrl.weights.pieces.planning import HeldTensor

FACTS = 5  #: numbers of a parameter in the table that ranks agree on: dtype, dimensions, up to three lengths
PACE = 1 << 30  #: bytes that rank 0 is behind the ranks that send to it, at most
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOATS = ("float32", "bfloat16", "float16", "float64")
#: a parameter of one expert, in its layer: those of Megatron's own experts, and of Transformer Engine's grouped ones
EXPERT = re.compile(r"(mlp\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)")


# ---- in


@torch.no_grad()
def load_hf(
    policy: Policy,
    directory: str | Path,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    scheme: Scheme | None = None,
) -> int:
    """Fill the model from the safetensors of a Hugging Face directory; collective, each tensor is read by one rank.

    Args:
        progress: what shows how far it is, such as report.progress.track.
        scheme: how FP8 matrices are coded, which are then read for what they stand for; None: there may be none.

    Returns:
        Bytes of tensors that this rank has read.

    Raises:
        DataError: the same on all ranks, names the tensors that are missing, in excess, of another shape or no floats,
            or the file that cannot be read.
    """
    directory = Path(directory)
    rank = policy.ranks.rank
    names = _listing(directory, rank, policy.family.stacked)
    table = _table(policy)
    where = {name: entry.file for name, entry in names.items()}
    names = widened(names, scheme, directory) if scheme else names
    _check_wide(directory, names)
    _check_names(policy, directory, names)
    _check_shapes(policy, directory, names, table)
    nbytes = {name: math.prod(e.shape) * ITEM_BYTES[e.dtype] for name, e in names.items() if e.dtype in FLOATS}
    readings = divide(_parameters(policy, table), nbytes)
    limit = LIMIT if policy.ranks.world > 1 else 0  # one tensor at a time, where none waits for it
    with ExitStack() as stack, host_group() as group:
        reader = ExpertsApart if policy.family.stacked else SafetensorsDirectory
        files = Dequantized(directory, stack, where, scheme) if scheme else reader(directory, stack, where)
        shown = iter(progress(readings))
        for some in rounds(readings, limit):
            exchange(some, files, rank, group)
            for _ in some:
                next(shown)
        next(shown, None)  # it ends only where it is asked for more
    policy.optimizer.reload_model_params()  # the optimizer's fp32 copies
    return files.read


def _listing(directory: Path, rank: int, stacked: bool) -> dict[str, Entry]:
    """The tensors of a directory, as rank 0 has found them, single experts of stacked ones; collective."""

    def find() -> dict[str, Entry]:
        found = listing(directory) or read_header(directory / SINGLE)
        return single(found) if stacked else found

    found = agree(find, rank == 0)
    return msgspec.convert(broadcast_json(found), dict[str, Entry])


def _parameters(policy: Policy, table: Iterable[HeldParameter]) -> Iterator[Parameter]:
    """Every parameter of the table, with this rank's part of it."""
    mine = _own(policy)
    for held in table:
        cut = partial(_part, held, _shapes(policy, held.rule))
        own = mine.get(held.rule.megatron)
        yield Parameter(held.rule.hf, held.copies, cut, own[1].detach() if own else None)


def _part(held: HeldParameter, shapes: Shapes, tensors: Sequence[torch.Tensor], number: int) -> torch.Tensor:
    return CUTS[held.rule.kind].part(tensors, number, held.shape, shapes).to(held.dtype)


def _check_wide(directory: Path, names: Mapping[str, Entry]) -> None:
    """Raise DataError if the weights are FP8: training starts from the numbers that were quantised, not from what is
    left of them.
    """
    if scaled := sorted(name for name in names if name.endswith((".weight_scale", ".weight_scale_inv"))):
        raise DataError(
            f"{directory} holds quantised weights ({scaled[0]}), from which training cannot start",
            "name the wide ones, a Hugging Face or torch_dist directory (hpcrl convert to-torch-dist makes one of what "
            "is left), by --ref-load or --load; --hf-checkpoint may stay, for the engines",
        )


def _check_names(policy: Policy, directory: Path, names: Mapping[str, Entry]) -> None:
    held = set(names)
    expected = _expected(policy)
    missing = expected - held
    extra = {n for n in held - expected if not policy.family.ignores(n, policy.hf_config)}
    if missing or extra:
        texts = [
            f"{what} {_some(sorted(which))}"
            for what, which in (("lacks", missing), ("holds in excess", extra))
            if which
        ]
        further = any(is_head(rule.megatron) and missing.intersection(rule.hf) for _, rule in policy.tensors())
        fix = "leave out --mtp-num-layers" if further else "do config.json and weights belong together?"
        raise DataError(f"{directory}: the model {' and '.join(texts)}", fix)


def _check_shapes(policy: Policy, directory: Path, names: Mapping[str, Entry], table: Iterable[HeldParameter]) -> None:
    wrong = []
    for held in table:
        rule = held.rule
        full = CUTS[held.rule.kind].full(held.shape, _shapes(policy, held.rule))
        for name, wanted in zip(rule.hf, full, strict=True):
            found = names[name]
            if found.shape != wanted:
                wrong.append(f"{name} is {list(found.shape)}, config.json asks for {list(wanted)}")
            elif found.dtype not in FLOATS:
                wrong.append(f"{name} holds {found.dtype}, not one of {', '.join(FLOATS)}")
    if wrong:
        raise DataError(f"{directory}: {_some(wrong, '; ')}")


def _some(items: list[str], between: str = ", ") -> str:
    rest = f" and {len(items) - 4} more" if len(items) > 4 else ""
    return between.join(items[:4]) + rest


# ---- out


@torch.no_grad()
def export(
    policy: Policy, patient: dist.ProcessGroup | None = None, heads: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full tensor) of every tensor, once; collective: all ranks iterate to the end.

    Tensors are valid on global rank 0 and only until the next is asked for; other ranks get tensors on "meta".  A tied
    output layer is not a separate tensor.  The parts of one parameter at a time (of an expert: of one linear layer)
    go from the ranks that hold them to rank 0; no other rank has more than its own.

    A rank does not begin to send long before rank 0 can take what it sends: a send that waits counts against the
    timeout of the groups from its first moment, and the last of a large model is taken many minutes after the first.

    Args:
        patient: a gloo group of all ranks, in which they wait for what rank 0 does with the tensors; None: the world.
        heads: with the layers that predict further tokens, where the model has them.
    """
    mine = _own(policy)
    rows: dict[tuple[str, ...], HeldParameter] = {}
    for held in _table(policy):
        rows.setdefault(held.rule.hf, held)  # of a tied pair, the embedding; in the order of `holdings`
    if missing := _expected(policy) - {name for names in rows for name in names}:
        raise HpcrlError(f"no rank holds {_some(sorted(missing))}")
    ahead = 0
    for held in rows.values():
        if is_head(held.rule.megatron) and not heads:
            continue
        own = mine.get(held.rule.megatron)
        if ahead >= PACE:
            _wait_for_rank_0(policy, patient)
            ahead = 0
        ahead += held.nbytes
        yield from zip(held.rule.hf, _collect(policy, held, own[1] if own else None), strict=True)


def _wait_for_rank_0(policy: Policy, patient: dist.ProcessGroup | None) -> None:
    if policy.ranks.device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # waiting for a send of NCCL's does not hold the host
    dist.barrier(group=patient)


def _collect(policy: Policy, held: HeldParameter, parameter: torch.Tensor | None) -> list[torch.Tensor]:
    """The tensors of one rule, on rank 0; elsewhere their likes on "meta"."""
    rank = policy.ranks.rank
    cut = CUTS[held.rule.kind]
    shapes = _shapes(policy, held.rule)
    if rank:
        if rank in held.owners:
            _exchange(dist.isend, [(parameter.detach().contiguous(), 0)])
        return [torch.empty(shape, dtype=held.dtype, device="meta") for shape in cut.full(held.shape, shapes)]
    empty = partial(torch.empty, held.shape, dtype=held.dtype, device=policy.ranks.device)
    parts = [empty() if owner else parameter.detach() for owner in held.owners]
    _exchange(dist.irecv, [(part, owner) for part, owner in zip(parts, held.owners, strict=True) if owner])
    return cut.join(parts, shapes)


def _exchange(operation: Callable[..., Any], pairs: list[tuple[torch.Tensor, int]]) -> None:
    """Send or receive tensors to or from ranks of the world."""
    if pairs:  # batched, NCCL uses the world's own communicator instead of making one for each pair of ranks
        for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer) for tensor, peer in pairs]):
            work.wait()


@dataclass(frozen=True)
class HeldParameter:
    """What every rank knows of one parameter: its rule, the shape of one rank's part, dtype, and who holds the parts.

    Attributes:
        copies: for each part, in order of TP (of an expert's: ETP) rank, the global ranks that hold it.
    """

    rule: Rule
    shape: tuple[int, ...]
    dtype: torch.dtype
    copies: tuple[tuple[int, ...], ...]

    @property
    def owners(self) -> tuple[int, ...]:
        """The first that holds each part: who sends it to rank 0."""
        return tuple(ranks[0] for ranks in self.copies)

    @property
    def nbytes(self) -> int:
        """Of all parts together."""
        return math.prod(self.shape) * self.dtype.itemsize * len(self.copies)


def _table(policy: Policy) -> list[HeldParameter]:
    """Every parameter that some rank holds, agreed among all ranks as a table of numbers.

    Raises:
        HpcrlError: if no rank holds a part of one.
    """
    ranks = policy.ranks
    mine = _own(policy)
    rules = [rule for _, rule in policy.tensors()]
    sizes = [ranks.tp_size if rule.expert is None else ranks.etp_size for rule in rules]
    numbers = torch.full((len(rules), FACTS + ranks.world), -1, dtype=torch.int32)
    for row, rule in zip(numbers, rules, strict=True):
        if rule.megatron not in mine:
            continue
        parameter = mine[rule.megatron][1]
        known = [DTYPES.index(parameter.dtype), parameter.dim(), *parameter.shape]
        row[: len(known)] = torch.tensor(known)
        row[FACTS + ranks.rank] = ranks.tp_rank if rule.expert is None else ranks.etp_rank
    numbers = numbers.to(ranks.device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    found = []
    groups: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
    for rule, size, (dtype, dims, *rest) in zip(rules, sizes, numbers.tolist(), strict=True):
        parts = rest[FACTS - 2 :]
        if dtype < 0:
            continue
        key = (size, *parts)
        if key not in groups:
            groups[key] = tuple(
                tuple(rank for rank, part in enumerate(parts) if part == number) for number in range(size)
            )
        if () in groups[key]:
            raise HpcrlError(f"no rank holds part {groups[key].index(())} of {rule.megatron}")
        found.append(HeldParameter(rule, tuple(rest[:dims]), DTYPES[dtype], groups[key]))
    return found


@torch.no_grad()
def holdings(policy: Policy, heads: bool = False) -> tuple[dict[str, HeldTensor], dict[str, OwnTensor]]:
    """(who holds which part of each Hugging Face tensor, this rank's own parts), by name; collective.

    A tied output layer is one more copy of the embedding.  Own parts are the parameters themselves.

    Args:
        heads: with the layers that predict further tokens, where the model has them.
    """
    mine = _own(policy)
    rank = policy.ranks.rank
    known: dict[tuple[Any, ...], list[tuple[tuple[int, ...], Pattern]]] = {}
    held: dict[str, HeldTensor] = {}
    own: dict[str, OwnTensor] = {}
    for entry in _table(policy):
        rule = entry.rule
        if is_head(rule.megatron) and not heads:
            continue
        shapes = _shapes(policy, entry.rule)
        key = (rule.kind, entry.shape, entry.copies, shapes)
        if key not in known:
            known[key] = held_parts(rule.kind, entry.shape, shapes, entry.copies)
        for which, (name, (shape, parts)) in enumerate(zip(rule.hf, known[key], strict=True)):
            twin = held.get(name)
            held[name] = HeldTensor(shape, parts if twin is None else (*twin.parts, *parts))
            if rule.megatron in mine and name not in own:
                part = next(number for number, ranks in enumerate(entry.copies) if rank in ranks)
                places = CUTS[rule.kind].places(part, entry.shape, shapes)
                own[name] = OwnTensor(mine[rule.megatron][1], places, which, shape)
    return held, own


def part_group(policy: Policy, expert: bool) -> dist.ProcessGroup:
    """The ranks that hold the parts of this rank's parameters: of experts, or of all others."""
    if expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


# ---- names


def _own(policy: Policy) -> dict[str, tuple[Rule, torch.Tensor]]:
    """This rank's parameters with their rules, by name.

    Raises:
        HpcrlError: if the family has no rule for one.
    """
    rules = dict(policy.tensors())
    held = {
        _in_whole_model(module, name, policy.ranks): value
        for module in policy.modules
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and "_extra_state" not in name
        if not (policy.value_head and name.startswith("output_layer."))  # no Hugging Face model has it
        if policy.heads or not is_head(name)  # which the policy has, and nothing is to be done with
    }
    if unknown := sorted(held.keys() - rules.keys()):
        raise HpcrlError(f"family {policy.family.model_type} has no rule for {_some(unknown)}")
    return {name: (rules[name], value) for name, value in held.items()}


def _in_whole_model(module: GPTModel, name: str, ranks: Ranks) -> str:
    """A parameter's name with the numbers of layer and expert in the whole model, not in its pipeline stage and EP
    rank."""
    name = mtp_name(name)
    match = re.match(r"decoder\.layers\.(\d+)\.|mtp\.layers\.\d+\.transformer_layer\.", name)
    if match is None:
        return name
    layer = match[0]
    if match[1]:
        layer = f"decoder.layers.{module.decoder.layers[int(match[1])].layer_number - 1}."
    rest = name[match.end() :]
    if expert := EXPERT.match(rest):
        first = ranks.ep_rank * (module.config.num_moe_experts // ranks.ep_size)
        rest = f"{expert[1]}{first + int(expert[2])}{rest[expert.end() :]}"
    return layer + rest


def _expected(policy: Policy) -> set[str]:
    """The tensors that a directory must hold and an export gives."""
    return {name for _, rule in policy.tensors() for name in rule.hf}


def _shapes(policy: Policy, rule: Rule) -> Shapes:
    ranks = policy.ranks
    parts = ranks.tp_size if rule.expert is None else ranks.etp_size
    return Shapes.of(vars(policy.config), policy.vocab_size, parts)
