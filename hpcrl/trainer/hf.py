"""Weights from a Hugging Face directory into the ranks, and out of them again.

Invariants: loading reads each file once, a slice at a time, and every tensor of the files has exactly one place; export
gives back every tensor once, bit for bit what the ranks hold, with one full tensor in memory at a time.  Nothing is
pickled between ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open

from hpcrl.errors import DataError, HpcrlError
from hpcrl.models.family import Rule
from hpcrl.trainer.slicing import CUTS, Shapes

if TYPE_CHECKING:
    from hpcrl.trainer.model import Policy

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOATS = ("F32", "BF16", "F16", "F64")


# ---- in


@torch.no_grad()
def load_hf(policy: Policy, directory: str | Path) -> None:
    """Fill the model from the safetensors of a Hugging Face directory; collective, every rank reads its own part.

    DataError, the same on all ranks, names the tensors that are missing, in excess, of another shape or no floats, or the
    file that cannot be read.
    """
    shapes = _shapes(policy)
    with ExitStack() as stack:
        files = Files(Path(directory), stack)
        _check_names(policy, files)
        _check_shapes(policy, files, shapes)
        for rule, parameter in _own(policy).values():
            sources = [files.slice(name) for name in rule.hf]
            parameter.copy_(CUTS[rule.kind].part(sources, policy.ranks.tp_rank, tuple(parameter.shape), shapes))
    policy.optimizer.reload_model_params()  # the optimizer's fp32 copies


class Files:
    """The safetensors files of a directory, opened lazily: one, or several with an index."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self.stack = directory, stack
        self.opened: dict[str, Any] = {}
        index = directory / "model.safetensors.index.json"
        try:
            if index.is_file():
                self.where = msgspec.json.decode(index.read_bytes())["weight_map"]
            else:
                self.where = dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise DataError(f"{index} is no index of safetensors: {error!r}") from error

    def _open(self, name: str) -> Any:
        if name not in self.opened:
            path = self.directory / name
            if not path.is_file():
                raise DataError(f"{path} is not there", "--hf-checkpoint needs safetensors weights")
            try:
                self.opened[name] = self.stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise DataError(f"{path} cannot be read: {error}", "is it complete?") from error
        return self.opened[name]

    def slice(self, name: str) -> Any:
        """Tensor `name`: its header now, its numbers when it is indexed."""
        try:
            return self._open(self.where[name]).get_slice(name)
        except SafetensorError as error:
            raise DataError(f"{self.directory / self.where[name]} does not hold {name}: {error}") from error


def _check_names(policy: Policy, files: Files) -> None:
    held, expected = set(files.where), _expected(policy)
    missing, extra = expected - held, {n for n in held - expected if not policy.family.ignores(n, policy.hf_config)}
    if missing or extra:
        texts = [f"{what} {_some(sorted(names))}" for what, names in (("lacks", missing), ("holds in excess", extra)) if names]
        raise DataError(f"{files.directory}: the model {' and '.join(texts)}", "do config.json and weights belong together?")


def _check_shapes(policy: Policy, files: Files, shapes: Shapes) -> None:
    wrong = []
    for rule, _, part, _ in _table(policy):
        for name, wanted in zip(rule.hf, CUTS[rule.kind].full(part, shapes), strict=True):
            found = files.slice(name)
            if tuple(found.get_shape()) != wanted:
                wrong.append(f"{name} is {list(found.get_shape())}, config.json asks for {list(wanted)}")
            elif found.get_dtype() not in FLOATS:
                wrong.append(f"{name} holds {found.get_dtype()}, not one of {', '.join(FLOATS)}")
    if wrong:
        raise DataError(f"{files.directory}: {_some(wrong, '; ')}")


def _some(items: list[str], between: str = ", ") -> str:
    rest = f" and {len(items) - 4} more" if len(items) > 4 else ""
    return between.join(items[:4]) + rest


# ---- out


@torch.no_grad()
def export(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full tensor) of every tensor, once; collective: all ranks iterate to the end.

    Tensors are valid on global rank 0 and only until the next is asked for; other ranks get tensors on "meta".  A tied
    output layer is not a tensor of its own.  One tensor at a time is gathered, over TP and then from its pipeline stage.
    """
    shapes, mine = _shapes(policy), _own(policy)
    rows = {row[0].hf: row for row in reversed(_table(policy))}  # of a tied pair, the embedding
    if missing := _expected(policy) - {name for names in rows for name in names}:
        raise HpcrlError(f"no rank holds {_some(sorted(missing))}")
    for rule, stage, shape, dtype in reversed(rows.values()):
        parameter = mine[rule.megatron][1] if rule.megatron in mine else None
        tensors = _collect(policy, rule, parameter, stage, shape, dtype, shapes)
        yield from zip(rule.hf, tensors if policy.ranks.rank == 0 else [t.to("meta") for t in tensors], strict=True)


def _collect(
    policy: Policy, rule: Rule, parameter: torch.Tensor | None, stage: int, shape: tuple[int, ...], dtype: torch.dtype, s: Shapes
) -> list[torch.Tensor]:
    """The tensors of one rule, on rank 0: gathered to the stage's first TP rank, then sent to the first stage."""
    ranks, cut = policy.ranks, CUTS[rule.kind]
    full = [torch.empty(x, dtype=dtype, device="meta") for x in cut.full(shape, s)]
    if ranks.dp_rank or ranks.cp_rank or ranks.pp_rank not in (0, stage):
        return full  # rank 0's tensor- and pipeline-parallel peers do the work
    if ranks.pp_rank == stage:
        parts = _gather(parameter.detach().contiguous(), ranks.tp_rank, ranks.tp_size)
        full = cut.join(parts, s) if ranks.tp_rank == 0 else full
    if stage and ranks.tp_rank == 0:
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        peer = dist.get_global_rank(pipeline, 0 if ranks.pp_rank else stage)
        for i, tensor in enumerate(full):
            if ranks.pp_rank:
                dist.send(tensor.contiguous(), peer, group=pipeline)
            else:
                full[i] = torch.empty_like(tensor, device=ranks.device)
                dist.recv(full[i], peer, group=pipeline)
    return full


def _gather(part: torch.Tensor, rank: int, size: int) -> list[torch.Tensor]:
    """Every TP rank's part on the first; nothing elsewhere."""
    if size == 1:
        return [part]
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(part) for _ in range(size)] if rank == 0 else None
    dist.gather(part, parts, dist.get_global_rank(group, 0), group=group)
    return parts or []


def _table(policy: Policy) -> list[tuple[Rule, int, tuple[int, ...], torch.dtype]]:
    """(rule, pipeline stage, shape of one rank's part, dtype) of every parameter that some stage holds.

    Agreed among the stages as a table of numbers.
    """
    rules = [rule for _, rule in policy.family.tensors(policy.hf_config)]
    mine = _own(policy)
    numbers = torch.full((len(rules), 4), -1, dtype=torch.int64)  # stage, dtype, rows, columns
    for i, rule in enumerate(rules):
        if rule.megatron in mine:
            parameter = mine[rule.megatron][1]
            row = [policy.ranks.pp_rank, DTYPES.index(parameter.dtype), *parameter.shape]
            numbers[i, : len(row)] = torch.tensor(row)
    numbers = numbers.to(policy.ranks.device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=parallel_state.get_pipeline_model_parallel_group())
    rows = zip(rules, numbers.tolist(), strict=True)
    return [(r, stage, tuple(n for n in shape if n >= 0), DTYPES[dtype]) for r, (stage, dtype, *shape) in rows if stage >= 0]


# ---- names


def _own(policy: Policy) -> dict[str, tuple[Rule, torch.Tensor]]:
    """This rank's parameters with their rules, by name.  HpcrlError if the family has no rule for one."""
    rules = dict(policy.family.tensors(policy.hf_config))
    state = policy.module.state_dict(keep_vars=True).items()
    held = {
        _in_whole_model(policy, name): value
        for name, value in state
        if isinstance(value, torch.Tensor) and "_extra_state" not in name
    }
    if unknown := sorted(held.keys() - rules.keys()):
        raise HpcrlError(f"family {policy.family.model_type} has no rule for {_some(unknown)}")
    return {name: (rules[name], value) for name, value in held.items()}


def _in_whole_model(policy: Policy, name: str) -> str:
    """A parameter's name with the layer's number in the whole model instead of in its pipeline stage."""
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    if match is None:
        return name
    number = policy.module.decoder.layers[int(match[1])].layer_number - 1
    return f"decoder.layers.{number}.{name[match.end() :]}"


def _expected(policy: Policy) -> set[str]:
    """The tensors that a directory must hold and an export gives."""
    names = {name for _, rule in policy.family.tensors(policy.hf_config) for name in rule.hf}
    return {name for name in names if not policy.family.ignores(name, policy.hf_config)}


def _shapes(policy: Policy) -> Shapes:
    c = policy.config
    return Shapes(c.num_attention_heads, c.num_query_groups, c.kv_channels, policy.vocab_size, policy.ranks.tp_size)
