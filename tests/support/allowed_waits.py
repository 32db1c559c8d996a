"""Where the host may wait for the device while a rollout is trained on, how often, and why it may.

What is not here is a mistake: tests/trainer/step/test_host_waits.py names its line, and an entry that nothing meets is
one too.  On a GPU each wait empties the queue of kernels: once in a step that takes minutes costs nothing, once in a
layer is a tenth of the step.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.trained_on_fake import Waits


@dataclass(frozen=True)
class Wait:
    """A place.

    Attributes:
        file: the end of its path.
        function: in it.
        times: at most so often for each unit.
        each: rollout, step (of the optimizer, of policy or critic), chunk (of a pipeline rank's layers, in a step),
            parameter (in a step), pass (of a micro-batch through a chunk), or expert layer (each call of it).
        why: the reason.
    """

    file: str
    function: str
    times: int
    each: str
    why: str


OURS = (
    Wait("step/prepare.py", "_means", 1, "rollout", "the rollout's metrics"),
    Wait("step/sums.py", "_over_data", 1, "step", "the step's metrics, of which some end the run"),
    Wait("step/routing_replay.py", "share", 1, "rollout", "a metric"),
    Wait("algorithms/interface.py", "_places", 1, "rollout", "groups are numbered"),
    Wait("algorithms/interface.py", "last", 3, "rollout", "of responses the last trained token: places, no numbers"),
    Wait("algorithms/returns.py", "_steps", 4, "rollout", "the trained tokens of all responses: places, no numbers"),
    Wait("algorithms/returns.py", "discounted_sums", 2, "rollout", "how many doublings the longest response takes"),
)
NEWER = not version("megatron-core").startswith("0.16.")
#: gone in Megatron-core 0.19
UNTIL_0_16 = (
    Wait("distributed/finalize_model_grads.py", "finalize_model_grads", 1, "chunk", "whether there was a token at all"),
    Wait("moe/moe_utils.py", "permute", 2, "expert layer", "without moe_permute_fusion, which Transformer Engine has"),
)
MEGATRONS = (
    *(() if NEWER else UNTIL_0_16),
    Wait(
        "optimizer/clip_grads.py", "get_grad_norm_fp32", 1, "step", "the norm; hpcrl ends the run if it is not finite"
    ),
    Wait("moe/token_dispatcher.py", "_maybe_dtoh_and_synchronize", 1, "expert layer", "how many rows go to which rank"),
)
#: with virtual pipeline stages, whose messages come in an order of their own
OF_VIRTUAL_STAGES = (
    Wait("pipeline_parallel/p2p_communication.py", "_communicate_shapes", 8, "pass", "micro-batches differ"),
)
#: with Megatron-core 0.19, which leaves the norm on the device
OF_NEWER_MEGATRON = (
    Wait("step/train_batch.py", "_update", 1, "step", "the norm, which ends a run if it is not finite"),
)
#: where neither Transformer Engine nor Apex is installed
WITHOUT_PACKAGES = (
    Wait("core/utils.py", "local_multi_tensor_l2_norm", 2, "parameter", "Transformer Engine's norm asks for nothing"),
)
#: with DeepEP and an offloaded optimizer
OF_RECIPES = (
    Wait("moe/fused_a2a.py", "forward", 1, "expert layer", "DeepEP: how many rows come from all ranks"),
    Wait("cpu_offloading/hybrid_optimizer.py", "step", 1, "parameter", "the CPU needs its gradient"),
    Wait(
        "cpu_offloading/hybrid_optimizer.py",
        "param_copy_back_gpu_hook",
        1,
        "parameter",
        "its fp32 copy is not pinned, and is made bf16 on the way",
    ),
)
ALLOWED = OURS + MEGATRONS + OF_VIRTUAL_STAGES + WITHOUT_PACKAGES


def check(waits: Waits, allowed: Sequence[Wait]) -> set[Wait]:
    """Fail with the line of every wait that is not allowed, or not so often; those that are met."""
    found: Counter[Wait] = Counter()
    wrong = []
    for sync, times in waits.of.items():
        where = [w for w in allowed if sync.file.endswith(w.file) and sync.function == w.function]
        if not where:
            wrong.append(f"{times} x {sync}")
        found.update(dict.fromkeys(where, times))
    for wait, times in found.items():
        most = wait.times * waits.units[wait.each]
        if times > most:
            wrong.append(f"{times} x {wait.file} {wait.function}, allowed: {most} ({wait.times} a {wait.each})")
    assert not wrong, "the host waits for the device:\n" + "\n".join(wrong)
    return set(found)


def check_all_met(request: pytest.FixtureRequest, ran: set[str], met: set[Wait], allowed: Sequence[Wait]) -> None:
    """Fail if no test of a module has met an entry of its table, which would let a new wait pass.

    To be called when the module has ended.  Of a part of its tests, or where one has failed, nothing can be said.

    Args:
        ran: node ids of its tests that have run in this process.
    """
    chosen = [item for item in request.session.items if item.path == request.path]
    functions = {getattr(item, "originalname", item.name) for item in chosen}
    whole = functions >= {name for name in vars(request.module) if name.startswith("test_")}
    if not whole or request.session.testsfailed:
        return
    if {item.nodeid for item in chosen} - ran:
        assert "PYTEST_XDIST_WORKER" not in os.environ, "its tests belong into one process: --dist loadgroup"
        return
    unused = [f"{wait.file} {wait.function}: {wait.why}" for wait in allowed if wait not in met]
    assert not unused, "unused entries of allowed_waits.py:\n" + "\n".join(unused)
