"""Which kinds of sandboxes are tried where before a stage begins."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.launch.attempts.box_trials import kinds_to_try, refuse_untried
from hpcrl.plan import Host, hosts_kept, make_plan
from hpcrl.sandbox.nodes.trial import USUAL, BoxTrial, try_kinds
from tests.support.able import needs

HOSTS = [Host("a", 2), Host("b", 0), Host("c", 0)]
SFT = {"loss_type": "sft_loss", "label_key": "l"}
NODES = {"rollout_num_gpus": 1, "custom_rm_path": "m.f", "sandbox_on": "nodes"}


@pytest.mark.parametrize(
    ("stages", "tried"),
    [
        ([SFT], {}),
        ([SFT, NODES], {"c": (USUAL,)}),
        ([SFT, NODES | {"sandbox_on": "rollout"}], {}),
        ([SFT, NODES | {"sandbox_on": "engines", "sandbox_kind": "apptainer"}], {"a": ("apptainer",)}),
        ([SFT, NODES, NODES, NODES | {"sandbox_kind": "apptainer"}], {"c": (USUAL, "apptainer")}),
        ([NODES, NODES], {}),
        ([NODES, NODES | {"sandbox_num_nodes": 2}], {"b": (USUAL,)}),
        ([NODES, NODES | {"sandbox_kind": "apptainer"}], {"c": ("apptainer",)}),
        ([SFT, NODES | {"sandbox_num_nodes": 3}], {}),
    ],
)
def test_kinds_of_later_stages(stages: list[dict[str, object]], tried: dict[str, tuple[str, ...]]) -> None:
    """Where their sandboxes will be, but for what the stage's own servers make there at once; of a plan that the hosts
    cannot hold, nothing."""
    first, *later = (Options(actor_num_gpus_per_node=1, **values) for values in stages)
    kept = hosts_kept((first, *later))
    assert kinds_to_try(first, make_plan(first, HOSTS, "r", kept=kept), later, HOSTS, kept) == tried


def test_a_host_without_boxes_is_named() -> None:
    wanted = dict.fromkeys("abc", (USUAL,))
    refuse_untried(wanted, dict.fromkeys("abc", BoxTrial()))
    with pytest.raises(HpcrlError, match=r"host b: no bwrap \(and 1 more\); install it"):
        refuse_untried(wanted, {"a": BoxTrial(), "b": BoxTrial("no bwrap", "install it")})
    with pytest.raises(HpcrlError, match="host c: .*no answer"):
        refuse_untried(wanted, {"a": BoxTrial(), "b": BoxTrial()})


@needs("namespaces")
def test_kinds_are_tried_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one that the environment names, too; the first that cannot be had is named."""
    (tmp_path / "unshare").symlink_to(shutil.which("unshare") or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not try_kinds(["unshare", USUAL]).what
    found = try_kinds(["unshare", "bwrap"])
    assert "bwrap" in found.what and found.hint
    monkeypatch.setenv("HPCRL_SANDBOX_KIND", "docker")
    assert "docker" in try_kinds([USUAL]).what
