"""How many engines there are, and what those need that somebody else has started: pure functions of the resolved
options.

Invariant: the GPUs of engines divide into whole ones; an address that passes is HOST:PORT, and stands once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcrl.config.options import Options
from hpcrl.errors import UsageError

ADDRS = "--rollout-external-engine-addrs"
KEYS = "--rollout-external-engine-keys"
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/\[\]]+)):(\d{1,5})\Z")


def split_address(text: str, flag: str = ADDRS) -> tuple[str, int]:
    """(host, port) of HOST:PORT, an IPv6 address in brackets.  UsageError names the flag."""
    found = _ADDRESS.match(text)
    if found is None or not 0 < int(found[3]) < 65536:
        raise UsageError(f"{flag} {text}: that is no address of an engine", "write HOST:PORT, such as 10.0.0.5:8100")
    return found[1] or found[2], int(found[3])


def check_engines(o: Options) -> None:
    """UsageError for GPUs that make no whole engines, or none where some are needed."""
    gpus, each = o.engine_gpus, o.rollout_num_gpus_per_engine
    if gpus % each:
        raise UsageError(
            f"--rollout-num-gpus {gpus} cannot be divided by --rollout-num-gpus-per-engine {each}", "change one of them"
        )
    parts = o.engine_data_parallel_size
    if parts < 1 or each % parts:
        raise UsageError(
            f"--rollout-num-gpus-per-engine {each} cannot be divided by --vllm-data-parallel-size {parts}",
            "change one of them",
        )
    if o.needs_engines and gpus < 1 and not o.rollout_external_engine_addrs:
        why = "--eval-interval" if o.learns_labels else f"--loss-type {o.loss_type}"
        raise UsageError(f"{why} needs engines", "give --rollout-num-gpus, 1 or more")


def check_external(o: Options) -> None:
    """UsageError for addresses that are none, and for engines that this run cannot share."""
    addresses = [split_address(text) for text in o.rollout_external_engine_addrs]
    if twice := next(
        (text for text in o.rollout_external_engine_addrs if addresses.count(split_address(text)) > 1), None
    ):
        raise UsageError(f"{ADDRS} {twice} is given twice", "name each engine once")
    if addresses and o.colocate:
        raise UsageError(
            f"{ADDRS} and --colocate exclude each other: engines elsewhere take no turns with this trainer"
        )
    if addresses and o.rollout_external_engine_keys is None:
        raise UsageError(f"{ADDRS} without {KEYS}", "name the directory that hpcrl engines serve --keys was given")
    if addresses and o.weight_transfer == "shm":
        raise UsageError(
            f"--weight-transfer shm does not reach {ADDRS}", "use auto, gloo or nccl, as they were served with"
        )


def inert_in_external(o: Options) -> Iterator[tuple[str, str]]:
    """Options of such engines that do nothing in this combination, and why."""
    if not o.rollout_external_engine_addrs:
        yield "rollout_external_engine_keys", f"{ADDRS} is not given"
