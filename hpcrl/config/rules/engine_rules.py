"""How many engines there are, what external ones need, what goes together in a weight update, and what speculative
decoding (--vllm-speculative-config) asks of a run: pure functions of the options, and of config.json.

vLLM draws from the policy's own distribution whatever was drafted, so that tokens and log-probs are those of a run
without it.  Invariants: the GPUs of engines divide into whole engines; an address that passes is HOST:PORT, and stands
once; an update that cannot be, and what has no effect on it, is refused before anything starts; no weight update brings
a draft its weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.toolbox.plugins import PluginRoom

if TYPE_CHECKING:
    from hpcrl.config.options import Options


ADDRS = "--rollout-external-engine-addrs"
KEYS = "--rollout-external-engine-keys"
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/\[\]]+)):(\d{1,5})\Z")


def split_address(text: str, flag: str = ADDRS) -> tuple[str, int]:
    """(host, port) of HOST:PORT, an IPv6 address in brackets.  UsageError names the flag."""
    found = _ADDRESS.match(text)
    if found is None or not 0 < int(found[3]) < 65536:
        raise UsageError(
            f"{flag} {text}: that is not an address of an engine", "write HOST:PORT, such as 10.0.0.5:8100"
        )
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


# ---- weight rules

#: each file is a way of --weight-transfer, named as the option's value
TRANSPORTS = PluginRoom(Path(__file__).parents[2] / "weights" / "transports")


def check_weights(o: Options) -> None:
    """UsageError for a way of transfer that there is not, or that an update of this kind cannot take."""
    if o.weight_transfer != "auto" and o.weight_transfer not in TRANSPORTS:
        raise UsageError(
            f"--weight-transfer {o.weight_transfer} is not a transport",
            TRANSPORTS.hint(o.weight_transfer, also=["auto"]),
        )
    if o.weight_update == "delta" and o.weight_transfer == "nccl":
        raise UsageError(
            "--weight-update delta finds and keeps what has changed in the host's memory, --weight-transfer nccl sends "
            "from the GPU's",
            "give --weight-update auto or resharded, or --weight-transfer gloo",
        )
    if o.weight_update in ("resharded", "delta") and o.weight_transfer == "disk":
        raise UsageError(
            f"--weight-update {o.weight_update}: what goes over --weight-transfer disk is whole tensors",
            "leave one of them out",
        )
    if o.weight_transfer == "ipc":
        _check_ipc(o)
    pieces = o.weight_update in ("resharded", "delta")
    if (parts := o.engine_data_parallel_size) > 1 and (pieces or o.weight_transfer == "ipc"):
        flag, value = ("--weight-update", o.weight_update) if pieces else ("--weight-transfer", o.weight_transfer)
        raise UsageError(
            f"{flag} {value} and --vllm-data-parallel-size {parts} (slime's --sglang-dp-size) exclude each other: of "
            "an engine's"
            " data-parallel parts, vLLM lets only the first tell what it holds",
            f"give {flag} auto",
        )


def _check_ipc(o: Options) -> None:
    """UsageError where a trainer rank's memory cannot be opened by all engines, or would not be all that they need."""
    if not o.colocate:
        raise UsageError(
            "--weight-transfer ipc is for engines on the trainer's GPUs, and --colocate is not given",
            "give --colocate, or --weight-transfer auto",
        )
    if o.actor_num_nodes > 1:
        raise UsageError(
            "--weight-transfer ipc: no GPU's memory can be opened from another host, and --actor-num-nodes is "
            f"{o.actor_num_nodes}",
            "use --weight-transfer auto, or one node",
        )
    if o.weight_update in ("gathered", "delta"):
        raise UsageError(
            f"--weight-update {o.weight_update}: what goes over --weight-transfer ipc is pieces, whole, from the GPU's "
            "memory",
            "give --weight-update auto or resharded, or --weight-transfer shm",
        )


def inert_in_weights(o: Options) -> Iterator[tuple[str, str]]:
    """(options, why they do nothing)"""
    if o.weight_transfer != "disk":
        yield "update_weight_disk_dir custom_update_weight_post_write_path", f"--weight-transfer is {o.weight_transfer}"
    if o.weight_update != "delta":
        yield "weight_update_check_interval", f"--weight-update is {o.weight_update}"


FLAG = "--vllm-speculative-config"
OWN_LAYERS = "mtp"  #: the method that drafts with the layers which a checkpoint has behind the model's last one
_LAYERS_BEHIND = ("num_nextn_predict_layers", "num_mtp_layers")  #: of config.json: how many those are


def check_speculation(o: Options) -> None:
    """UsageError for a setting that vLLM would refuse when the engines start, or at the first sample."""
    setting = o.vllm.get("speculative_config")
    if setting is None:
        return
    count = setting.get("num_speculative_tokens")
    if count is not None and (type(count) is not int or count < 1):
        raise UsageError(f"{FLAG}: num_speculative_tokens is {count!r}, expected a whole number >= 1")
    if setting.get("method") == OWN_LAYERS and count is None:
        raise UsageError(f"{FLAG} does not say how many tokens are drafted", 'give it "num_speculative_tokens"')
    for name in ("rollout_min_p", "eval_min_p"):
        if value := getattr(o, name):
            raise UsageError(
                f"--{name.replace('_', '-')} {value:g} and {FLAG} exclude each other: vLLM checks no draft against "
                "min-p",
                "leave one of them out",
            )


def layers_behind(config: Mapping[str, Any]) -> int:
    """Layers that a checkpoint has behind the model's last one, by its config.json; they predict further tokens."""
    return next((int(config[name]) for name in _LAYERS_BEHIND if config.get(name)), 0)


def check_draft_layers(o: Options, config: Mapping[str, Any]) -> None:
    """UsageError if drafts are to come from layers that this model does not have."""
    setting = o.vllm.get("speculative_config") or {}
    if setting.get("method") == OWN_LAYERS and "model" not in setting and not layers_behind(config):
        raise UsageError(
            f'{FLAG} with "method": "{OWN_LAYERS}" (slime\'s --sglang-speculative-algorithm EAGLE): the model\'s '
            "config.json has no"
            " layers that predict further tokens (num_nextn_predict_layers)",
            "leave it out",
        )
