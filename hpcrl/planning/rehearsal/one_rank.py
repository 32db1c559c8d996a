"""One rank of a run, rehearsed in this process: it builds its model and optimizer by the trainer's own functions,
loads, trains a step, saves and exports, on the device that knows shapes alone.

Invariant: what is called is what a run calls; replaced are the device, the groups, and what other ranks would say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist

from hpcrl.config.options import Options
from hpcrl.groups import planned
from hpcrl.planning.rehearsal.batch import micro_batches, rehearsed, share_of
from hpcrl.planning.rehearsal.collectives import LOGPROBS, PHASES, RESUME, SAVE, START, STEP, TRAINS, UPDATE, Recorder
from hpcrl.planning.rehearsal.device import FakeDevice, join
from hpcrl.planning.rehearsal.live_bytes import DeviceBytes
from hpcrl.planning.rehearsal.reports import RankReport
from hpcrl.transport.share_format import Share

Phase = Callable[[str], AbstractContextManager[None]]


def rehearse(options: Options, rank: int) -> RankReport:
    """Take the step of `rank`; raises what the run would raise."""
    lengths = micro_batches(options)
    options = rehearsed(options, lengths)
    recorder = Recorder(rank, kinds(options))
    with FakeDevice() as device, DeviceBytes(device) as live:
        device.recorder = recorder

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            before, recorder.phase = recorder.phase, name
            with live.phase(name):
                yield
            recorder.phase = before

        answering = partial(others_answer, device)
        policy = take_step(options, lengths, partial(join, options, rank), phase, answering)
        parts = running_parts_of(policy)
    peaks = {name: live.peaks[name] for name in PHASES if name in live.peaks}
    return RankReport(rank, policy.ranks.pp_rank, peaks, live.host_peak, recorder.calls, parts)


def kinds(options: Options) -> dict[tuple[int, ...], str]:
    """ranks of a group -> its kind, the first of those that have these ranks."""
    found = {tuple(group): kind for kind, groups in reversed(planned(options).items()) for group in groups}
    return {tuple(range(options.world_size)): "world"} | found


def take_step(
    options: Options,
    lengths: list[list[int]],
    joined: Callable[[], Any],
    phase: Phase,
    answering: Callable[[Any, Share, Any], AbstractContextManager[None]],
) -> Any:
    """Take one step through all phases, on whatever device the process has.

    Args:
        options: those that `rehearsed` gave for micro-batches of these `lengths`.
        joined: makes the rank a member of its groups.
        phase: entered around each, with its name.
        answering: what is entered around the training.

    Returns:
        The policy.
    """
    from hpcrl.models.files.config_json import read_config
    from hpcrl.trainer.checkpoint.save_load import Position, everything
    from hpcrl.trainer.megatron import model
    from hpcrl.trainer.step import packing, passes, train_batch
    from hpcrl.trainer.weight_export import sent_part

    with phase(START):
        ranks = joined()
        policy = model.build(options, ranks)
    if options.megatron.get("use_distributed_optimizer", True):
        with phase(RESUME):
            load_nothing(policy)
    with phase(START):
        others = other_models(policy, options)
    share = share_of(options, read_config(options.hf_checkpoint or ""), lengths, ranks.dp_rank)
    run, update, logprobs = passes.run, train_batch._update, passes.logprobs

    taken: set[str] = set()

    def in_phase(*args: Any, **named: Any) -> Any:
        name = LOGPROBS if named.get("forward_only") else TRAINS
        taken.add(name)
        with phase(name):
            return run(*args, **named)

    def in_step(*args: Any) -> Any:
        with phase(STEP):
            return update(*args)

    with (
        answering(policy, share, others),
        mock.patch.object(passes, "run", in_phase),
        mock.patch.object(passes, "logprobs", _of_ends(logprobs)),
        mock.patch.object(train_batch, "_update", in_step),
    ):
        train_batch.train(policy, ranks, options, share, others)
    if LOGPROBS not in taken:  # a run takes them where a rollout has several optimizer steps
        ends = share.micro_batches[0][0], share.micro_batches[0][-1]
        with phase(LOGPROBS):
            packed = [packing.pack(share.batch, rows, ranks, policy.config.sequence_parallel) for rows in ends]
            logprobs(policy, options, packed)
    with phase(SAVE):
        everything(policy, ranks, Position(1, 1))
    if options.num_engines:
        with phase(UPDATE):
            export(sent_part(policy, options), options.update_weight_buffer_size)
    return policy


def _of_ends(logprobs: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """Log-probs of the first and the last micro-batch: all but the last are alike, and none waits for another's
    backward pass, so that two say what all take."""

    def of_ends(policy: Any, options: Options, packed: Sequence[Any], experts: Any = "own") -> list[torch.Tensor]:
        if len(packed) <= 2 or experts != "own":
            return logprobs(policy, options, packed, experts)
        first, last = logprobs(policy, options, [packed[0], packed[-1]], experts)
        return [first, *(first.clone() for _ in packed[2:]), last]

    return of_ends


def running_parts_of(policy: Any) -> str:
    """What the policy runs with, in a line."""
    from hpcrl.trainer.megatron import running_parts

    return running_parts.line(policy, {})


# ---- what other ranks would say


class OtherRanks:
    """What the ranks with the loss tell the others, of each optimizer step in turn: that all train on as many tokens as
    the batch has."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = iter(tokens)
        self._text = b""

    def sums(self, _: FrameType, sums: torch.Tensor) -> list[float]:
        """What the ranks with the loss read."""
        return [next(self._tokens), *[0.0] * (len(sums) - 1)]

    def length(self) -> int:
        """Bytes of what they send to the other stages."""
        from hpcrl.trainer.step.sums import Totals

        self._text = msgspec.msgpack.encode(Totals({}, {}, {}, next(self._tokens)))
        return len(self._text)

    def text(self) -> list[int]:
        """These bytes."""
        return list(self._text)


@contextmanager
def others_answer(device: FakeDevice, policy: Any, share: Share, others: Any) -> Iterator[None]:
    """Within, `share` can be trained on: what is read of other ranks is what they would say."""
    steps = OtherRanks(share.step_tokens * (1 + (others.critic is not None)))
    device.answers["step/sums.py", "_over_data"] = steps.sums
    shape = _shape(policy, share)
    device.answers["p2p_communication.py", "_communicate_shapes"] = lambda _frame, _sizes: shape
    stock = dist.broadcast

    def broadcast(tensor: torch.Tensor, src: int, *args: Any, **more: Any) -> Any:
        if tensor.device.type == "cpu" and src != dist.get_rank():  # what the stage with the loss says
            tensor.copy_(torch.tensor(steps.length() if tensor.dtype == torch.int64 else steps.text()))
        return stock(tensor, src, *args, **more)

    with mock.patch.object(dist, "broadcast", broadcast):
        yield


def _shape(policy: Any, share: Share) -> list[int]:
    """What a pipeline stage with virtual stages is sent: it is asked of the longest micro-batch."""
    from hpcrl.trainer.step import packing

    split = policy.config.sequence_parallel
    rows = packing.pack(share.batch, share.micro_batches[0][0], policy.ranks, split).tokens.size(1)
    return [rows // (policy.ranks.tp_size if split else 1), 1, policy.config.hidden_size]


def other_models(policy: Any, options: Options) -> Any:
    """The models that a step needs in addition to the trained one, of the same shapes."""
    from hpcrl.config.rules.algorithm_needs import needs
    from hpcrl.trainer.lora.layer import BaseAsReference
    from hpcrl.trainer.megatron import model
    from hpcrl.trainer.megatron.host_memory import HostWeights
    from hpcrl.trainer.reference_and_critic import critic_options
    from hpcrl.trainer.step.prepare import OtherWeights

    wanted = needs(options)
    reference = lambda: HostWeights(policy) if policy.lora is None else BaseAsReference(policy.modules)  # noqa: E731
    return OtherWeights(
        reference=reference() if wanted.reference else None,
        teacher=HostWeights(policy) if wanted.teacher_model else None,
        critic=model.build(critic_options(options), policy.ranks, value_head=True) if wanted.critic else None,
    )


# ---- files and weights
#
# What a rehearsed rank does with its state: it loads a checkpoint without reading it, and puts its weights
# where an update of the engines sends them from.
#
# Invariant: each tensor of a rank is touched once, by the functions of a run.


def load_nothing(policy: Any) -> None:
    """Load a checkpoint without reading it: every tensor is where it belongs, as the files' are at the end."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, extract_matching_values
    from megatron.core.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedBase,
        ShardedTensorFactory,
        apply_factories,
        apply_factory_merges,
    )

    from hpcrl.trainer.checkpoint import save_load

    def read(request: Any, *_: Any) -> Any:
        halved, _ = extract_matching_values(request, lambda v: isinstance(v, ShardedTensorFactory), True)
        apply_factories(request)
        return apply_factory_merges(dict_list_map_outplace(here, request), halved)

    def here(value: Any) -> Any:
        if isinstance(value, LocalNonpersistentObject):
            return value.unwrap()
        return value.data if isinstance(value, ShardedBase) else value

    stored = SimpleNamespace(holds=lambda _: False)
    with mock.patch.multiple(save_load, open_stored=lambda *_: stored, read=read):
        save_load.load_state(policy, policy.ranks, Path("a checkpoint"))


def export(policy: Any, buffer: int) -> int:
    """Write every tensor of a rank through one buffer of `buffer` bytes, as an update does; return the number of
    elements.

    Args:
        policy: the part of it that is sent (`weight_export.sent_part`).
    """
    import torch

    from hpcrl.models.slicing import CUTS
    from hpcrl.trainer.lora.layer import sent_values
    from hpcrl.trainer.megatron import parameter_shards
    from hpcrl.weights.pieces.elements import OwnTensor, PieceValues

    memory = torch.empty(buffer // 2, dtype=torch.bfloat16, device=next(policy.modules[0].parameters()).device)
    written = 0
    value = sent_values(policy.modules, policy.part)
    for rule, parameter in parameter_shards.own_parameters(policy).values():
        part = policy.ranks.tp_rank if rule.expert is None else policy.ranks.etp_rank
        places = CUTS[rule.kind].places(part, tuple(parameter.shape), parameter_shards.shapes_of(policy, rule))
        own = {name: OwnTensor(parameter, places, which, (), value) for which, name in enumerate(rule.hf)}
        values = PieceValues(own, dict.fromkeys(own, "BF16"), None, {})
        for place in places:
            columns = place.columns or (0, parameter.shape[1] if parameter.dim() > 1 else 1)
            width = columns[1] - columns[0]
            most = max(1, memory.numel() // width)
            for first in range(place.rows[0], place.rows[1], most):
                last = min(first + most, place.rows[1])
                out = memory[: (last - first) * width].view(last - first, width)
                values.write(rule.hf[place.tensor], (first, last, *columns), out)
                written += (last - first) * width
    return written
