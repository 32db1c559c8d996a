"""`hpcrl doctor`: each thing that can be wrong is told, with its host, and nothing that is right is called wrong."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcrl.cli import doctor
from hpcrl.doctor import directories, packages
from hpcrl.doctor.box_kinds import check_kinds
from hpcrl.launch.allocation_request import Component
from hpcrl.launch.node_checks import one_node
from hpcrl.launch.node_checks.all_nodes import NodesJob, NodeStep, examine, gather, without_directory
from hpcrl.launch.node_checks.one_node import UNSEEN, connect, parse_gpus
from hpcrl.launch.node_checks.records import all_records, leave_record, share_records
from hpcrl.launch.node_checks.reports import Gpu, NodeReport, judge_reports, merge
from hpcrl.launch.probe import HostReport, Network
from hpcrl.launch.site import SiteProfile
from hpcrl.launch.slurm import partitions
from hpcrl.run import gpu_environment
from hpcrl.run.process import CommandResult
from hpcrl.utils.check_results import Finding, last_line, size
from hpcrl.utils.waiting import Deadline
from tests.support.able import needs, require
from tests.support.published_models import MODELS


def bad(findings: list[Finding]) -> list[str]:
    """What is not ok, as lines."""
    return [finding.line() for finding in findings if finding.level != "ok"]


# ---- words


def test_the_last_line_that_says_something() -> None:
    assert last_line("x\n\n  y \n\n") == "y" and last_line("") == "no output"


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 30, 70 << 30, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "70 GiB",
        "3.0 TiB",
    ]


# ---- Slurm

#: as Slurm 22.05 prints it, shortened
PARTITIONS = """\
PartitionName=main AllowGroups=ALL Default=YES MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=node[1-4] State=UP TotalCPUs=64 TotalNodes=4
PartitionName=short AllowGroups=ALL Default=NO MaxNodes=2 MaxTime=1-00:00:00 Nodes=node[1-4] State=DRAIN TotalCPUs=64 TotalNodes=4
"""


def test_partitions_are_read() -> None:
    (main, default), (short, other) = partitions.partitions(CommandResult(0, PARTITIONS))
    assert default and not other
    assert main == partitions.Partition("main", "UP", math.inf, math.inf, 4)
    assert short == partitions.Partition("short", "DRAIN", 1440, 2, 4)
    assert partitions.partitions(CommandResult(1, "Partition foo not found")) == []


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:8", {"": 8}),
        ("gpu:h100:8(S:0-1)", {"h100": 8}),
        ("gpu:a100:4(S:0-1),gpu:v100:2(S:0),nvme:1", {"a100": 4, "v100": 2}),
        ("(null)", {}),
        ("nvme:1,shard:8", {}),
    ],
)
def test_generic_resources_are_read(text: str, gpus: dict[str, int]) -> None:
    assert partitions.parse_gres(text) == gpus


def test_shapes_are_read() -> None:
    shapes = partitions.parse_shapes("4|idle|64|gpu:8\n2|down*|64+|gpu:h100:8(S:0-1)|64000+\nnonsense\n")
    assert shapes == [partitions.Shape(4, "idle", 64, {"": 8}), partitions.Shape(2, "down", 64, {"h100": 8}, 64000)]
    assert [shape.usable for shape in shapes] == [True, False]


UP = partitions.Partition("gpu", "UP", 60, 4, 4)
EIGHT = [partitions.Shape(3, "mix", 64, {"h100": 8}), partitions.Shape(1, "drain", 64, {"h100": 8})]


@pytest.mark.parametrize(
    ("need", "partition", "limit", "kind", "expected"),
    [
        (Component("trainer", 3, 8, 64), UP, 60, None, []),
        (Component("trainer", 3, 8, None), UP, 60, "h100", []),
        (
            Component("trainer", 3, 8, 64),
            UP,
            61,
            None,
            ["fail  trainer.partition gpu: time is 61 minutes, the partition's limit is 60"],
        ),
        (
            Component("trainer", 4, 8, 64),
            UP,
            60,
            None,
            ["warn  trainer.partition gpu: 4 nodes with 8 GPUs and 64 CPUs requested, 3 of 4"],
        ),
        (
            Component("engine", 1, 9, 1),
            UP,
            60,
            None,
            ["fail  engine.partition gpu: 1 node with 9 GPUs and 1 CPUs requested; 0 of its 4"],
        ),
        (
            Component("engine", 1, 8, 65),
            UP,
            60,
            None,
            ["fail  engine.partition gpu: 1 node with 8 GPUs and 65 CPUs requested; 0 of its 4"],
        ),
        (
            Component("engine", 1, 1, 1),
            UP,
            60,
            "a100",
            ["fail  engine.partition gpu: 1 node with 1 a100 GPU and 1 CPUs requested; 0 of its 4"],
        ),
        (
            Component("trainer", 5, 8, 1),
            UP,
            60,
            None,
            ["fail  trainer.partition gpu: 5 nodes requested, a job may have 4", "fail  "],
        ),
        (
            Component("rollout", 1, 0, 1),
            partitions.Partition("gpu", "DOWN", 60, 4, 4),
            1,
            None,
            ["warn  rollout.partition gpu is DOWN; it will wait"],
        ),
        (
            Component("rollout", 1, 0, 1),
            partitions.Partition("gpu", "INACTIVE", 60, 4, 4),
            1,
            None,
            ["fail  rollout.partition gpu is INACTIVE"],
        ),
    ],
)
def test_a_partition_must_hold_what_is_asked_for(
    need: Component, partition: partitions.Partition, limit: int, kind: str | None, expected: list[str]
) -> None:
    found = bad(partitions.judge_component(need, partition, EIGHT, limit, kind))
    assert len(found) == len(expected) and all(
        line.startswith(start) for line, start in zip(found, expected, strict=True)
    )
    assert all("; " in line for line in found), "every finding has a hint"


def commands(folder: Path, **scripts: str) -> None:
    """Stand-ins for Slurm's commands."""
    for name, body in {
        "sbatch": "echo slurm 22.05",
        "srun": "",
        "squeue": "",
        "sacct": "",
        "scontrol": "",
        "sinfo": "",
        **scripts,
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)


def test_slurm_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = SiteProfile(time="1:00:00")
    wanted = [Component("trainer", 1, 8, 1)]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bad([*partitions.responds()])[0].startswith(
        "fail  sbatch, srun, squeue, scontrol, sinfo not found: no Slurm here; "
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}:/usr/bin:/bin")
    shown = f"cat <<'E'\n{PARTITIONS}E"
    commands(tmp_path, scontrol=shown, sinfo="echo '4|idle|64|gpu:8'")
    assert bad([*partitions.responds(), *partitions.fits(site, wanted)]) == []
    commands(tmp_path, scontrol=shown, sinfo="echo '4|idle|64|gpu:4'", sacct="exit 1")
    assert "sacct gives no answer" in bad([*partitions.responds()])[0]
    assert "fail  trainer.partition main: 1 node with 8 GPUs" in bad([*partitions.fits(site, wanted)])[0]
    commands(tmp_path, scontrol="echo Partition foo not found; exit 1", sinfo="echo main; echo low")
    found = bad([*partitions.fits(SiteProfile.model_validate({"trainer": {"partition": "foo"}}), wanted)])
    assert found == ["fail  trainer.partition foo: Partition foo not found; set trainer.partition; there are main, low"]
    commands(tmp_path, scontrol="echo 'PartitionName=a State=UP Default=NO'", sinfo="echo a")
    assert bad([*partitions.fits(site, wanted)])[0].startswith(
        "warn  there is no default partition: unless the site chooses one"
    )
    commands(tmp_path, scontrol="echo Unable to contact slurm controller >&2; exit 1")
    assert bad([*partitions.fits(site, wanted)])[0].startswith(
        "warn  scontrol does not say what partitions there are: Unable"
    )
    commands(tmp_path, squeue="sleep 30")
    began = time.monotonic()
    assert "squeue: no answer within" in bad([*partitions.responds(seconds=0.2)])[0]
    assert time.monotonic() - began < 10


def test_slots_of_nodes_without_gpus_are_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition without GPUs, and without any generic resource, holds a run whose profile says gpus_per_node = 0."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    commands(tmp_path, scontrol=f"cat <<'E'\n{PARTITIONS}E", sinfo="echo '4|idle|64|(null)'")
    wanted = [Component("trainer", 2, 4, 8)]
    assert (
        "fail  trainer.partition main: 2 nodes with 4 GPUs"
        in bad([*partitions.fits(SiteProfile(time="1:00:00"), wanted)])[0]
    )
    site = SiteProfile.model_validate({"time": "1:00:00", "trainer": {"gpus_per_node": 0}})
    (found,) = partitions.fits(site, wanted)
    assert found.level == "ok" and "2 nodes with 8 CPUs" in found.what


@pytest.mark.parametrize(
    ("mem", "fits"), [("0", True), ("62G", True), ("64001", False), ("900G", False), ("1T", False)]
)
def test_nodes_must_have_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mem: str, fits: bool) -> None:
    """Slurm refuses such a job too, but leaves a failed one in its accounting."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    commands(tmp_path, scontrol=f"cat <<'E'\n{PARTITIONS}E", sinfo="echo '4|idle|64|gpu:8|64000'")
    site = SiteProfile.model_validate({"time": "1:00:00", "trainer": {"mem": mem}})
    (found,) = partitions.fits(site, [Component("trainer", 1, 8, 1)])
    assert found.level == ("ok" if fits else "fail") and (fits or f"{mem} of memory" in found.what)


def test_one_of_several_partitions_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several partitions, one must be able to hold the component."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    shown = (
        'case "$*" in *small*) echo PartitionName=small State=UP MaxNodes=1 TotalNodes=9;; *large*) echo '
        "PartitionName=large State=UP TotalNodes=9;; *) exit 1;; esac"
    )
    commands(tmp_path, scontrol=shown, sinfo="echo '9|idle|64|gpu:8'")

    def found(names: str) -> list[str]:
        site = SiteProfile.model_validate({"time": "1:00:00", "trainer": {"partition": names}})
        return bad([*partitions.fits(site, [Component("trainer", 2, 8, 8)])])

    assert found("small,large") == found("large") == []
    assert found("small")[0].startswith("fail  trainer.partition small: 2 nodes requested, a job may have 1")
    assert [line.split(":")[0] for line in found("small,none")] == [
        "fail  trainer.partition small",
        "fail  trainer.partition none",
    ]


# ---- the run directory

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
tmpfs /w/local tmpfs rw 0 0
fs@tcp:/w /w lustre rw 0 0
nfs:/h /my\\040home nfs4 rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/root/x", ("/", "ext4")),
        ("/w/a/b", ("/w", "lustre")),
        ("/w/local/a", ("/w/local", "tmpfs")),
        ("/what", ("/", "ext4")),
        ("/my home/x", ("/my home", "nfs4")),
    ],
)
def test_the_mount_of_a_directory_is_found(path: str, expected: tuple[str, str]) -> None:
    assert directories.mount_of(Path(path), MOUNTS) == expected


@pytest.mark.parametrize(
    ("path", "several", "level"),
    [
        ("/w/a", True, "ok"),
        ("/root/x", True, "warn"),
        ("/w/local", True, "warn"),
        ("/tmp/x", True, "warn"),
        ("/root/x", False, "ok"),
    ],
)
def test_a_file_system_of_one_node_is_noticed(path: str, several: bool, level: str) -> None:
    assert directories.file_system(Path(path), MOUNTS, several).level == level


def test_tmp_is_suspected_even_on_a_shared_root() -> None:
    assert directories.file_system(Path("/tmp/x"), "fs / lustre rw 0 0", True).level == "warn"


@pytest.mark.parametrize(("free", "level"), [(100, "ok"), (15, "warn"), (6, "fail")])
def test_room_is_counted_in_checkpoints(free: int, level: str) -> None:
    stat = os.statvfs_result((4096, 1 << 30, 0, 0, free, 0, 0, 0, 0, 255))
    assert directories.room(stat, Path("/w"), 1 << 30).level == level


def test_nothing_stays_behind_where_a_run_would_lie(tmp_path: Path) -> None:
    found = [*directories.check_storage(tmp_path / "new" / "run", several=False)]
    assert bad(found) == [] and not any(tmp_path.iterdir())
    (tmp_path / "file").touch()
    assert "is not a directory" in bad([*directories.check_storage(tmp_path / "file" / "run", several=False)])[0]
    assert "is not writable" in bad([*directories.check_storage(Path("/proc/none"), several=False)])[0]


# ---- packages

LINES = [
    "msgspec>=0.20",
    'tensorboard>=2; extra == "report"',
    'torch==2.13.0; extra == "cpu"',
    'vllm>=0.26; extra == "gpu"',
]


@pytest.mark.parametrize(
    ("installed", "roles", "expected"),
    [
        ({"msgspec": "0.22.0"}, False, []),
        ({"msgspec": "0.19"}, False, ["fail  msgspec is 0.19, >=0.20 is needed"]),
        ({}, False, ["fail  msgspec is not installed, >=0.20 is needed"]),
        ({"msgspec": "0.22", "torch": "2.13.0+cpu"}, True, []),
        ({"msgspec": "0.22", "torch": "2.12.0+cpu"}, True, ["warn  torch is 2.12.0+cpu, ==2.13.0 is needed"]),
        ({"msgspec": "0.22", "torch": "2.11.0", "vllm": "0.27"}, True, []),
        ({"msgspec": "0.22", "torch": "2.11.0"}, True, ["warn  vllm is not installed, >=0.26 is needed"]),
    ],
)
def test_versions_are_compared(installed: dict[str, str], roles: bool, expected: list[str]) -> None:
    found = bad([*packages.check_packages(roles, installed.get, LINES)])
    assert [line.partition(";")[0] for line in found] == expected


def test_this_environment_fits() -> None:
    assert not [line for line in bad([*packages.check_packages(roles=False)]) if line.startswith("fail")]
    assert any("torch" in line for line in packages.requirements())


# ---- the model


def safetensors(path: Path, data: int = 16) -> None:
    header = json.dumps(
        {"__metadata__": {"a": "b"}, "w": {"dtype": "U8", "shape": [data], "data_offsets": [0, data]}}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(data))


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000))
def test_a_file_that_was_cut_anywhere_is_noticed(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "model.safetensors"
    safetensors(file)
    whole = file.read_bytes()
    assert directories.flaw(file) == ""
    file.write_bytes(whole[: cut % len(whole)])
    assert directories.flaw(file) != ""
    file.write_bytes(whole + b"x")
    assert directories.flaw(file).startswith(f"{file} cannot be read: ")


@pytest.mark.parametrize(
    "data", [b"\xff" * 64, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"w": {}}', b"<html>not found</html>"]
)
def test_a_file_that_is_something_else_is_noticed(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    assert directories.flaw(tmp_path / "x").startswith(f"{tmp_path / 'x'} cannot be read: ")


def test_every_part_of_a_model_must_be_there(tmp_path: Path) -> None:
    assert bad([*directories.check_model_directory(str(tmp_path))]) == [
        f"fail  --hf-checkpoint {tmp_path}: no config.json there; name a Hugging Face model directory"
    ]
    assert "model.safetensors does not exist" in bad(directories.files(tmp_path))[0]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}}))
    safetensors(tmp_path / "1.safetensors")
    [line] = bad(directories.files(tmp_path))
    assert "2.safetensors does not exist" in line
    safetensors(tmp_path / "2.safetensors")
    assert (
        bad(directories.files(tmp_path)) == []
        and directories.total(tmp_path) == 2 * (tmp_path / "1.safetensors").stat().st_size
    )
    index.write_text("{}")
    assert "an index of safetensors" in bad(directories.files(tmp_path))[0] and directories.total(tmp_path) == 0


# ---- what the nodes say


VERSIONS = {"torch": "2.13.0", "vllm": "0.32.0"}


def nodes(*names: str, **changes: Any) -> list[NodeReport]:
    """Healthy reports of trainer nodes; `changes` for all of them."""
    made = []
    for number, name in enumerate(names, 1):
        base = HostReport(name, name, (Network("ib0", f"10.0.0.{number}", 24, 100_000),), True, 1000.0, 64, 256 << 30)
        report = NodeReport(
            base,
            "trainer",
            seen=names,
            unreached="",
            gpus=tuple(Gpu(i, "H100", 80_000, 79_000) for i in range(8)),
            devices=8,
            shm=64 << 30,
            versions=VERSIONS,
            findings=(Finding("ok", "", "these work: vllm"),),
        )
        made.append(msgspec.structs.replace(report, **changes))
    return made


WANTED = {"trainer": 8}


def said(reports: list[NodeReport], **more: Any) -> list[str]:
    return bad(judge_reports(reports, WANTED, **{"expected": len(reports), **more}))


def test_healthy_nodes_are_well() -> None:
    reports = nodes("n1", "n2", "n3")
    assert said(reports, window=(999.5, 1000.5)) == []
    assert Finding("ok", "n[1-3]", "trainer, 64 CPUs, 256 GiB free, 8 GPUs (H100)") in judge_reports(reports, WANTED)
    assert Finding("ok", "n[1-3]", "these work: vllm") in judge_reports(reports, WANTED)
    assert said(nodes("n1")) == [] and said([]) == ["fail  none of the nodes reported; see the step's log"]


def test_host_memory_is_the_plans(tmp_path: Path) -> None:
    """Each trainer's host has the memory that the plan takes of one, and an engine's needs none."""
    from hpcrl.config.options import Options

    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-4B"][1]))
    options = Options(hf_checkpoint=str(tmp_path), colocate=True, actor_num_gpus_per_node=8, rollout_num_gpus=8)
    doctor.job(doctor.Case(SiteProfile(), (options,), tmp_path / "run"), tmp_path)
    [step] = msgspec.json.decode((tmp_path / "job.json").read_bytes(), type=NodesJob).steps
    assert step.needs == ["vllm"] and 50 << 30 < step.memory < 200 << 30
    small = base(memory=30 << 30)(nodes("n1")[0])
    [line] = said([small], memory={"trainer": step.memory})
    assert line.startswith("fail  n1: 30 GiB of host memory free") and "hpcrl plan --host-memory" in line
    assert said([small], memory={"engine": step.memory}) == [] == said(nodes("n1"), memory={"trainer": step.memory})


def base(**changes: Any) -> Callable[[NodeReport], NodeReport]:
    return lambda report: msgspec.structs.replace(report, base=msgspec.structs.replace(report.base, **changes))


def on(**changes: Any) -> Callable[[NodeReport], NodeReport]:
    return lambda report: msgspec.structs.replace(report, **changes)


FAULTS: list[tuple[Callable[[NodeReport], NodeReport], str]] = [
    (base(sees=False), "fail  n2: it does not see the run directory"),
    (on(wrote="No space left on device"), "fail  n2: it cannot write to the run directory: No space left on device"),
    (on(seen=("n1", "n2")), "fail  n2: in the run directory it does not see the file of n3"),
    (base(networks=()), "fail  the hosts share no network"),
    (base(networks=(Network("ib0", "10.0.0.1", 24, 0),)), "fail  the hosts share no network"),
    (base(networks=(Network("ib0", "10.0.0.2", 24, 1000),)), "warn  n2: ib0 runs at 1000 Mbit/s, others at 100000"),
    (
        on(unreached="it cannot connect to n1: 10.0.0.1: refused"),
        "fail  n2: it cannot connect to n1: 10.0.0.1: refused",
    ),
    (on(unreached=None), "warn  1 node connected to no other"),
    (base(time=1003.0), "fail  n2: its clock differs by at least 2.5 s from the login node's"),
    (on(versions=VERSIONS | {"torch": "2.12.0"}), "fail  n2: torch is 2.12.0, on most nodes 2.13.0"),
    (
        on(versions={"torch": "2.13.0"}),
        "fail  n2: vllm is absent, on most nodes 0.32.0",
    ),
    (on(gpus=(), devices=0), "fail  n2: 0 GPUs for trainer, 8 are needed"),
    (on(visible="0,1"), "fail  n2: 2 GPUs for trainer, 8 are needed"),
    (on(gpus=None), "warn  n2: 8 GPUs, but nvidia-smi does not answer"),
    (
        on(gpus=tuple(Gpu(i, "H100", 80_000, 79_000 if i else 9) for i in range(8))),
        "warn  n2: GPU 0 has 9 of 80000 MiB free",
    ),
    (
        on(gpus=tuple(Gpu(i, "A100", 80_000, 79_000) for i in range(8))),
        "warn  the trainers have different GPUs: 16 H100, 8 A100",
    ),
    (on(shm=64 << 20), "warn  n2: only 64 MiB free in /dev/shm"),
    (on(locked=8 << 20), "warn  n2: a process may lock 8.0 MiB of memory at most"),
    (
        on(findings=(Finding("fail", "", "no nvcc", "load it"), Finding("ok", "", "these work: vllm"))),
        "fail  n2: no nvcc; load it",
    ),
]


def test_memory_lock_limit_needs_infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on locked memory matters only where there is InfiniBand."""
    for limit, there, said in (
        (1 << 20, True, 1 << 20),
        (1 << 20, False, None),
        (one_node.resource.RLIM_INFINITY, True, None),
    ):
        monkeypatch.setattr(one_node.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        monkeypatch.setattr(one_node, "INFINIBAND", tmp_path if there else tmp_path / "no")
        assert one_node.locked_memory() == said


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
@pytest.mark.parametrize(("fault", "expected"), FAULTS, ids=[expected[:40] for _, expected in FAULTS])
def test_one_fault_on_one_node_is_one_line(
    fault: Callable[[NodeReport], NodeReport], expected: str, order: tuple[int, ...]
) -> None:
    reports = nodes("n1", "n2", "n3")
    reports[1] = fault(reports[1])
    [line] = said([reports[i] for i in order], window=(999.5, 1000.5))
    if "different GPUs" not in expected:
        assert line.startswith(expected)
    assert "; " in line or "Mbit/s" in line


def test_who_did_not_report_or_reported_twice_is_told() -> None:
    assert "fail  2 of 3 nodes reported (n1, n2)" in said(nodes("n1", "n2"), expected=3)[0]
    reports = nodes("n1", "n2")
    assert any(line.startswith("fail  n1: it sent 2 reports") for line in said([*reports, reports[0]]))


def test_loopback_and_duplicate_addresses() -> None:
    """The loopback and a duplicate address are not a network."""
    lo = nodes("n1", "n2")
    assert any(("n[1-2]" in line and "is a loopback address" in line) for line in said(lo, interface="lo"))
    network = Network("eth0", "172.17.0.1", 24, 0)
    same = [base(networks=(network,))(report) for report in lo]
    assert sum("has the same address 172.17.0.1" in line for line in said(same, interface="eth0")) == 2


def test_the_same_on_several_hosts_is_one_line() -> None:
    one = Finding("warn", "n1", "x", "y")
    two = Finding("warn", "n2", "x", "y")
    assert merge([one, Finding("ok", "n3", "x", "y"), two]) == [
        Finding("warn", "n[1-2]", "x", "y"),
        Finding("ok", "n3", "x", "y"),
    ]


def test_what_nvidia_smi_prints_is_read() -> None:
    text = "0, NVIDIA H100 80GB HBM3, 81559, 81007\n1, NVIDIA H100 80GB HBM3, [N/A], [N/A]\n\nNo devices were found\n"
    assert parse_gpus(text) == (Gpu(0, "NVIDIA H100 80GB HBM3", 81559, 81007), Gpu(1, "NVIDIA H100 80GB HBM3", 0, 0))


def test_short_job_asks_for_no_gpus(tmp_path: Path) -> None:
    """The short job asks for no GPUs where slots are processes."""
    from hpcrl.config.options import Options

    site = SiteProfile(trainer={"gpus_per_node": 0}, engine={"gpus_per_node": 4})
    case = doctor.Case(site, (Options(actor_num_gpus_per_node=2, rollout_num_gpus=4),), tmp_path / "run")
    doctor.job(case, tmp_path)
    steps = msgspec.json.decode((tmp_path / "job.json").read_bytes(), type=NodesJob).steps
    assert [(step.role, step.slots, step.gpus) for step in steps] == [("trainer", 2, 0), ("engine", 4, None)]
    assert [step.needs for step in steps] == [[], ["vllm"]]


def test_nodes_are_told_what_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step needs reaches its nodes, and that it uses none of their GPUs; a run's start looks at nothing else."""
    shows = ["bash", "-c", f'echo "$@" >> {tmp_path}/words; exit 1', "bash"]
    for number, more in enumerate([{"needs": ["vllm", "nvcc"], "gpus": 0}, {"needs": []}, {}]):
        examine(NodesJob([NodeStep("engine", 1, 1, shows, **more)]), tmp_path / str(number), seconds=5)
    monkeypatch.setattr(one_node, "die_with_parent", lambda: None)
    looked = []
    monkeypatch.setattr(one_node, "check_gpu_needs", lambda *given: looked.append(given) or ())
    for line in (tmp_path / "words").read_text().splitlines():
        one_node.main(line.split())  # none sees the directory
    assert looked == [(["vllm", "nvcc"], False), ([], True)]


def test_of_a_steps_output_only_a_short_line_is_read() -> None:
    """What several nodes print at once comes in pieces: reports are files."""
    text = f"module loaded\n{UNSEEN.format(host='n2')}\nhpcrl doctor: n3 does\nnot see its directory\n"
    assert without_directory(text) == ["n2"]


def test_reports_are_whole_and_may_be_late(tmp_path: Path) -> None:
    """Reports are whole files, and the last may be late."""
    one, two = nodes("n1", "n2")
    (tmp_path / "n1.7.report").write_bytes(msgspec.json.encode(one))
    (tmp_path / "n3.7.report").write_bytes(b"{")
    late = threading.Timer(0.3, (tmp_path / "n2.7.report").write_bytes, [msgspec.json.encode(two)])
    late.start()
    assert gather(tmp_path, 3, Deadline(20)) == [one, two]
    assert gather(tmp_path, 4, Deadline(0)) == [one, two], "who waits no longer takes what is there"
    late.join(60)


@pytest.mark.parametrize("came", [2, 3])
def test_missing_records_are_listed(tmp_path: Path, came: int) -> None:
    """All records come in one file, and those that did not come are missing."""
    for number in range(came):
        leave_record(tmp_path, f"n{number}", number)
    share_records(tmp_path, 3, 0.3)
    found = all_records(tmp_path, 3, 0.0)
    assert sorted(found) == [f"n{number}" for number in range(came)] and found["n1"].ranks == 1


# ---- for real, on this machine


def test_why_the_first_node_is_not_reached(tmp_path: Path) -> None:
    """No port was published, nobody listens there, or another program does; who has tried says so."""
    assert connect("127.0.0.1", "n1", tmp_path, Deadline(0.0)).endswith("has no port")
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    (tmp_path / one_node.PORT).write_text(str(number))
    assert "Connection refused" in connect("127.0.0.1", "n1", tmp_path, Deadline(5.0))
    (tmp_path / one_node.PORT).unlink()
    for each in tmp_path.glob("*.done"):
        each.unlink()
    listens = threading.Thread(target=one_node.listen, args=("127.0.0.1", "other", tmp_path, 1, 20.0))
    listens.start()
    assert "is another program's" in connect("127.0.0.1", "n1", tmp_path, Deadline(20.0))
    listens.join(20.0)
    assert not listens.is_alive()
    assert "can be bound on 203.0.113.1" in one_node.listen("203.0.113.1", "n1", tmp_path, 1, 0.0)


@pytest.mark.process
def test_two_nodes_meet_on_this_machine(tmp_path: Path) -> None:
    """Two processes play two nodes: they see each other's files and reach each other's ports."""
    each = f'for i in 1 2; do "{sys.executable}" -m hpcrl.launch.node_checks.one_node "$@" --host node$i & done; wait'
    job = NodesJob(
        [NodeStep("trainer", 2, 1, ["bash", "-c", each, "bash"], gpus=0, needs=["no_such"], memory=1e18)],
        interface="lo",
        gpus=False,
        seconds=20,
    )
    findings = examine(job, tmp_path / "nodes", seconds=60)
    lines = "\n".join(finding.line() for finding in findings)
    wrong = bad(findings)
    assert wrong[0] == "fail  node[1-2]: its address is a loopback address; name the site's network: interface ="
    assert wrong[1].startswith("fail  node[1-2]: no_such does not import: ModuleNotFoundError") and "no GPU" in lines
    assert len(wrong) > 2 and all("of host memory free" in line for line in wrong[2:])
    assert "ok    all 2 nodes see one run" in lines
    assert "port is reached from 1 node\n" in lines and "clocks agree" in lines


@pytest.mark.process
def test_a_node_elsewhere_and_one_that_fails_are_told(tmp_path: Path) -> None:
    """The first sees another directory, the second cannot even start: no wait goes on for ever."""
    node = f'"{sys.executable}" -m hpcrl.launch.node_checks.one_node'
    lost = NodeStep("trainer", 1, 1, ["bash", "-c", f"{node} {tmp_path}/elsewhere --host node1 --expect 2", "bash"])
    dead = NodeStep("engine", 1, 1, ["bash", "-c", "echo srun: error >&2; echo no such node >&2; exit 7", "bash"])
    found = bad(
        examine(
            NodesJob([lost, dead], gpus=False, echoes=("srun:",), seconds=1),
            tmp_path / "nodes",
            seconds=30,
        )
    )
    assert any(line.startswith("fail  node1: it does not see the run directory") for line in found)
    assert any("1 of 2 nodes reported (node1)" in line for line in found)
    assert any("ended with exit code 7: no such node" in line for line in found)
    slow = NodesJob([NodeStep("trainer", 1, 1, ["sleep", "60"])], gpus=False)
    began = time.monotonic()
    assert "none of 1 nodes reported" in bad(examine(slow, tmp_path / "slow", seconds=0.5))[0]
    assert time.monotonic() - began < 10


def all_reduce(count: int) -> dict[str, Any]:
    """One rank of a measured all-reduce."""
    import torch
    import torch.distributed as dist

    from hpcrl.doctor.selftest.checks.bandwidth import measure
    from hpcrl.doctor.selftest.rank import join

    device = join(30.0)
    found = measure(count, 2, device)
    right, plain = None, dist.all_reduce

    def wrong(tensor: torch.Tensor, **more: Any) -> None:
        plain(tensor, **more)
        tensor.view(-1)[-1] += 1

    dist.all_reduce = wrong
    try:
        measure(count, 1, device)
    except RuntimeError as error:
        right = str(error)
    finally:
        dist.all_reduce = plain
    dist.destroy_process_group()
    return {**found, "wrong": right}


@pytest.mark.process
def test_the_all_reduce_is_measured_and_checked() -> None:
    from hpcrl.doctor.selftest.checks.bandwidth import bus_bandwidth
    from tests.support.ranks import run_ranks

    found = run_ranks(3, all_reduce, 4096)
    for rank, result in enumerate(found):
        assert result["ranks"] == 3 and result["bytes"] == 4096 and result["backend"] == "gloo"
        assert result["bus_bandwidth"] == pytest.approx(bus_bandwidth(4096, result["seconds"], 3))
        assert result["wrong"].startswith(f"rank {rank}: ")
    assert len({result["seconds"] for result in found}) == 1, "the slowest rank counts for all"
    assert bus_bandwidth(100, 2.0, 4) == 75.0 and bus_bandwidth(100, 2.0, 1) == 0.0


# ---- the command


@pytest.mark.process
def test_the_login_node_is_looked_at(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands(tmp_path, scontrol=f"cat <<'E'\n{PARTITIONS}E", sinfo="echo '4|idle|64|gpu:8'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "x.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n')
    (tmp_path / "r.toml").write_text(
        f'hf_checkpoint = "{task / "model"}"\nprompt_data = "{tmp_path / "x.jsonl"}"\nrm_type = "exact"\ninput_key = '
        '"prompt"\nlabel_key = "label"\nrollout_num_gpus = 8\nnum_rollout = 1\n'
        "rollout_batch_size = 8\nn_samples_per_prompt = 8\nglobal_batch_size = 64\n"
    )
    argv = [str(tmp_path / "r.toml"), "--run-dir", str(tmp_path / "runs" / "a")]
    monkeypatch.setenv(gpu_environment.ON_CPUS, "1")
    assert doctor.main(argv) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "ok    no GPU here: " in out
    assert "the tokenizer loads; 128 token ids" in out and "1 node with 8 GPUs" in out and out.endswith(" 0 failed\n")
    assert not (tmp_path / "runs").exists()
    commands(tmp_path, scontrol=f"cat <<'E'\n{PARTITIONS}E", sinfo="echo '4|idle|64|gpu:4'")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"vocab_size": 8}')
    assert doctor.main([*argv, "--hf-checkpoint", str(tmp_path / "broken"), "--nodes"]) == 1
    out = capsys.readouterr().out
    assert (
        "model.safetensors does not exist" in out and "the tokenizer of" in out and "0 of its 4 nodes have that" in out
    )


@pytest.mark.parametrize("configured", [False, True])
def test_a_client_without_a_cluster(
    configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Debian's Slurm commands, with no configuration or with one whose controller is not there: a warning that says
    what it means, and a failure as soon as a site, a job's shape or the nodes are asked for."""
    require("squeue")
    monkeypatch.setattr(doctor.packages, "check_packages", lambda **_: ())
    monkeypatch.setattr(doctor, "check_kinds", lambda _: Finding("ok", "", "a sandbox"))
    monkeypatch.delenv("HPCRL_SITE", raising=False)
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=none(127.0.0.1)\nSlurmctldPort=9\nAuthType=auth/none\nMessageTimeout=2\n"
        "NodeName=none\nPartitionName=none Nodes=none Default=YES\n"
    )
    if configured:
        monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    elif Path("/etc/slurm/slurm.conf").exists():
        pytest.skip("a cluster is configured here")
    else:  # the name of an absent file would be looked for during a minute
        monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.chdir(tmp_path)
    assert doctor.main(["--run-dir", "runs/a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [told] = [line for line in lines if "squeue" in line]
    assert told.startswith("warn") and "hpcrl run" in told and "hpcrl submit" in told, told
    asked = [["--site", "default"]] if configured else [["--site", "default"], ["--time", "10"], ["--nodes"]]
    for words in asked:
        assert doctor.main([*words, "--run-dir", "runs/a"]) == 1
        assert any(line.startswith("fail  squeue: ") for line in capsys.readouterr().out.splitlines())
    if not configured:
        monkeypatch.setenv("HPCRL_SITE", "default")
        assert doctor.main(["--run-dir", "runs/a"]) == 1


@needs("namespaces")
@pytest.mark.process
def test_which_kinds_of_sandboxes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each has its reason; the one that the environment names, or the run, has to be there; one has to be in any case."""
    monkeypatch.delenv("HPCRL_SANDBOX_KIND", raising=False)
    (tmp_path / "unshare").symlink_to(shutil.which("unshare") or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = check_kinds()
    assert found.level == "ok" and "sandboxes: unshare;" in found.what and "bwrap is not installed" in found.what
    monkeypatch.setenv("HPCRL_SANDBOX_KIND", "apptainer")
    assert check_kinds().level == "warn" and check_kinds().hint.startswith("apptainer ")
    monkeypatch.delenv("HPCRL_SANDBOX_KIND")
    assert check_kinds({"bwrap"}).level == "warn" and check_kinds({"unshare"}).level == "ok"
    monkeypatch.setenv("HPCRL_SANDBOX_KIND", "docker")
    assert check_kinds().level == "fail"
    monkeypatch.delenv("HPCRL_SANDBOX_KIND")
    (tmp_path / "unshare").unlink()
    assert check_kinds().level == "warn" and "hpcrl import" in check_kinds().hint
