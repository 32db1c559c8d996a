"""The srun by which `hpcrl rehearse --on-node` runs on one node: pure."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.errors import UsageError
from hpcrl.launch.site import SiteProfile
from hpcrl.launch.site_file import load_site
from hpcrl.launch.slurm.one_node import CPUS, MOST, on_one_node
from hpcrl.planning.rehearsal.on_node import on_node, without

SITE = """
account = "top"
modules = ["cuda/12"]
setup = ["source /venv/bin/activate"]
srun = ["--network=no_vni"]
python = "/venv/bin/python"
[env]
GREETING = "it's"
[trainer]
partition = "gpu"
gpus_per_node = 4
cpus_per_node = 64
"""


def site(path: Path, more: str = "") -> SiteProfile:
    path.write_text(SITE + more)
    made = load_site(str(path))
    assert isinstance(made, SiteProfile)
    return made


def test_a_job_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Account and partition are those of the profile, of the CPU nodes where it has some; no GPU is asked for; what the
    shell gets is quoted."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    words = on_one_node(site(tmp_path / "s.toml"), ["rehearse", "my recipe.toml"], 3600)
    assert {"--account=top", "--partition=gpu", "--nodes=1", "--time=60", f"--cpus-per-task={MOST}"} <= set(words)
    assert "--network=no_vni" in words and not any("gpus" in word for word in words)
    assert words[-3:-1] == ["bash", "-c"]
    assert words[-1].splitlines() == [
        "module load cuda/12 || exit 1",
        "source /venv/bin/activate",
        "export GREETING='it'\"'\"'s'",
        "exec /venv/bin/python -m hpcrl rehearse 'my recipe.toml'",
    ]
    cpu = site(tmp_path / "s.toml", '[rollout]\npartition = "cpu"\naccount = "other"\n')
    words = on_one_node(cpu, ["rehearse"], 3600)
    assert {"--account=other", "--partition=cpu", f"--cpus-per-task={CPUS}"} <= set(words)
    assert "--cpus-per-task=5" in on_one_node(cpu, ["rehearse"], 3600, 5)


def test_a_step_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside an allocation nothing is asked of the queue, and the job's other steps keep their cores."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "3(x2)")
    words = on_one_node(site(tmp_path / "s.toml"), ["rehearse"], 3600)
    assert "--cpus-per-task=3" in words, "no more than the job has"
    assert "--overlap" in words and not any(word.startswith(("--partition", "--account", "--time")) for word in words)


def test_words_of_the_node() -> None:
    """What is for this side is left out, in both spellings."""
    given = ["r.toml", "--on-node", "--site", "a", "--lr", "1", "--site=b"]
    assert without(given, "on-node", "site") == ["r.toml", "--lr", "1"]
    assert without(given, "on-node", "") == ["r.toml", "--site", "a", "--lr", "1", "--site=b"]


def test_where_there_is_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so before anything is started."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="--on-node: Slurm is not here"):
        on_node(["r.toml", "--on-node"], {"on-node": True})
