"""What is asked of Slurm and the script that asks for it: pure functions, golden files, bash and shellcheck."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.cli.main import main
from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.launch.allocation_request import FLOOR, AllocationRequest, make_request
from hpcrl.launch.site import SiteProfile
from hpcrl.launch.slurm.het_executor import HetWatcher, of_another_job
from hpcrl.launch.slurm.job_script import BatchScript
from hpcrl.launch.slurm.partitions import queued_again
from hpcrl.launch.slurm.submit import render
from hpcrl.plan import make_plan
from hpcrl.utils.shipped_files import shipped
from tests.support.able import require

REPO = Path(__file__).parents[3]
#: Adam on the CPUs takes all cores of a node, and its memory
WHOLE_NODES = "--set exclusive=true trainer.mem=0"
#: script in sbatch/ -> the command line that printed it
PRINTED = {
    "quickstart.sbatch": "examples/quickstart.toml --actor-num-nodes 2 --time 30",
    "quickstart-one-job.sbatch": "examples/quickstart.toml --actor-num-nodes 2 --time 30 --layout homogeneous",
    "qwen3-4b-8gpu.sbatch": "examples/qwen3-4b-8gpu.toml --layout homogeneous --set trainer.gpus_per_node=8",
    "qwen3-4b-8gpu-async.sbatch": "examples/qwen3-4b-8gpu-async.toml --layout homogeneous --set "
    "trainer.gpus_per_node=8",
    "glm-z1-9b-8gpu.sbatch": "examples/glm-z1-9b-8gpu.toml --layout homogeneous --set trainer.gpus_per_node=8",
    "qwen3-4b-8gpu-colocated.sbatch": "examples/qwen3-4b-8gpu-colocated.toml",
    "glm-z1-9b-8gpu-colocated.sbatch": "examples/glm-z1-9b-8gpu-colocated.toml",
    "glm-4.5-355b-64gpu.sbatch": f"examples/glm-4.5-355b-64gpu.toml {WHOLE_NODES}",
    "glm-4.5-355b-64gpu-bf16.sbatch": f"examples/glm-4.5-355b-64gpu-bf16.toml {WHOLE_NODES}",
}


def in_checkout(text: str) -> str:
    """A printed script with paths of the checkout, in which those of sbatch/ are submitted."""
    text = text.replace(f"HPCRL_PYTHON={sys.executable}", "HPCRL_PYTHON=python3")
    return text.replace(str(shipped("launch")), "launch").replace(f"{REPO}/", "")


def test_a_printed_script_starts_from_any_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names task.sh, the recipe and the interpreter by whole paths."""
    monkeypatch.chdir(REPO / "examples")
    monkeypatch.delenv("HPCRL_SITE", raising=False)
    assert main(["submit", "quickstart.toml", "--print"]) == 0
    text = capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    (step,) = {line.split("=", 1)[1] for line in text.splitlines() if line.startswith("export HPCRL_STEP_0=")}
    assert Path(shlex.split(shlex.split(step)[0])[-1]).is_file()
    assert f"export HPCRL_PYTHON={sys.executable}" in text
    assert f"batch_process {REPO}/examples/quickstart.toml " in text


@pytest.mark.parametrize(("name", "words"), PRINTED.items())
def test_the_scripts_of_sbatch_are_what_hpcrl_prints(
    name: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails after a wanted change: make sbatch."""
    monkeypatch.chdir(REPO)
    monkeypatch.delenv("HPCRL_SITE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    assert main(["submit", *words.split(), "--print"]) == 0
    text = in_checkout(capsys.readouterr().out)
    assert text == (REPO / "sbatch" / name).read_text()
    assert len(text.splitlines()) < 150


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ([], "runs/{name}-7"),
        (["--run-dir", "/scratch/a b$USER/`x`"], "/scratch/a b$USER/`x`"),
        (["--run-dir", "here/{name}"], "here/{name}"),
        (["--run-dir", "{time}/{name}"], "7/{name}"),
    ],
)
def test_a_printed_script_keeps_the_run_directory(
    given: list[str], root: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    monkeypatch.delenv("HPCRL_SITE", raising=False)
    assert main(["submit", "examples/quickstart.toml", *given, "--print", "--set", "trainer.gpus_per_node=8"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    said = subprocess.run(
        ["bash", "-uc", f"exec() {{ printf '%s' \"${{@: -1}}\"; }}; {last}"],
        env={"SLURM_JOB_ID": "7", "HPCRL_PYTHON": "python", "PATH": "/bin:/usr/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert said.stdout == root.format(name="quickstart"), last


def test_a_printed_script_is_of_one_job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    assert main(["submit", "examples/quickstart.toml", "--print", "--chain", "3"]) == 2
    assert "--chain submits several" in capsys.readouterr().err


def test_a_percent_sign_in_a_directory_is_no_pattern() -> None:
    script = BatchScript("n", "t", "s", "true", "/a/100%j run/logs/job-%j.out", "/launch")
    site = SiteProfile(name="s", time="30")
    text = render(script, request(Options(hf_checkpoint="/m"), time="30"), site)
    assert "#SBATCH --output='/a/100%%j run/logs/job-%j.out'" in text


@pytest.mark.parametrize(
    "path",
    [
        *(REPO / "sbatch").glob("*.sbatch"),
        *(REPO / "sbatch").glob("*.sh"),
        *(REPO / "launch").glob("*.sh"),
        REPO / "hpcrl/config/slime/prelude.sh",
    ],
    ids=lambda p: p.name,
)
def test_bash_and_shellcheck_have_nothing_to_say(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=240)
    require("shellcheck")
    done = subprocess.run(["shellcheck", "--shell=bash", str(path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout


HOSTILE = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_categories=["Cc"]), min_size=1, max_size=20
)


@settings(max_examples=50, deadline=None)
@given(HOSTILE, HOSTILE, HOSTILE)
def test_no_value_leaves_its_quotes(account: str, value: str, module: str) -> None:
    """Whatever a profile holds, bash sees it as one word, and sbatch as one option."""
    site = SiteProfile(account=account, env={"PROBE": value}, modules=[module], python="/x y/python")
    script = BatchScript("n", "t", "s", 'printf "%s\\0" "$PROBE" "$HPCRL_PYTHON" "$HPCRL_STEP_0"', "o.out", "/la unch")
    text = render(script, request(Options(actor_num_gpus_per_node=1)), site)
    head, mark, body = text.partition("# What the site wants first")
    body = mark + body
    body = "module() { printf '%s\\0' \"$@\"; }\n" + body.replace("exec printf", "printf")
    done = subprocess.run(["bash", "-c", body], capture_output=True, check=True, timeout=240)
    said = done.stdout.decode(errors="surrogateescape").split("\0")
    assert said[:2] == ["load", module]
    assert said[2:4] == [value, "/x y/python"]
    assert shlex.split(said[4])[-2:] == ["bash", "/la unch/task.sh"]
    directives = [line for line in head.split("\n") if line.startswith("#SBATCH")]
    assert [shlex.split(line.removeprefix("#SBATCH "))[0] for line in directives if "--account" in line] == [
        f"--account={account}"
    ]


def test_site_lines_may_be_careless(tmp_path: Path) -> None:
    """conda's and Lmod's own scripts read variables that are not set and end with 1; a module that does not load ends
    the job."""
    careless = 'if [ -z "$PS1_NEVER_SET" ]; then false; fi'
    for setup, load, code, said in (
        ([careless], "true", 0, "e"),
        ([careless], "false", 1, "hpcrl: module load failed"),
        ([], "true", 0, "e"),
    ):
        site = SiteProfile(setup=[f"module() {{ {load}; }}", *setup], modules=["cuda"])
        text = render(
            BatchScript("n", "t", "s", "echo $-", "o.out", "/l"), request(Options(actor_num_gpus_per_node=1)), site
        )
        done = subprocess.run(
            ["bash", "-c", text.replace("exec echo", "echo")], capture_output=True, text=True, timeout=240
        )
        assert done.returncode == code and said in done.stdout + done.stderr
        if not code:
            assert "u" in done.stdout, "our own lines run under set -eu"


def test_a_job_that_waits_for_others() -> None:
    text = render(
        BatchScript("n", "t", "s", "true", "o.out", "/l"),
        request(Options(actor_num_gpus_per_node=1)),
        SiteProfile(after="7:8"),
    )
    assert "#SBATCH --dependency=afterok:7:8\n#SBATCH --kill-on-invalid-dep=yes\n" in text
    assert SiteProfile(after="7").again().after is None, "once it has started, a later start waits for nobody"


def test_the_chain_of_jobs(tmp_path: Path) -> None:
    """convert -> train -> export: each gets the number of the one before."""
    calls = tmp_path / "calls"
    for name, says in (("sbatch", "4711;cluster"), ("hpcrl", "job 4712")):
        stub = tmp_path / name
        stub.write_text(f'#!/bin/bash\necho "{name} $* MODEL=$MODEL RUN=$RUN" >> {calls}\necho "{says}"\n')
        stub.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MODEL": "m", "SAVE": "s", "RUN": "r", "NODES": "2"}
    script = REPO / "sbatch" / "chain.sh"
    said = subprocess.run(
        ["bash", script, "x.toml", "--site", "y"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert said.stdout.split() == ["convert:", "job", "4711", "train:", "job", "4712", "export:", "job", "4711"]
    convert, train, export = calls.read_text().splitlines()
    assert "--nodes=2" in convert and "MODEL=m" in convert and convert.split()[4].endswith("convert.sbatch")
    assert train.startswith("hpcrl submit x.toml --site y --run-dir r --ref-load s --after 4711 ")
    assert "--dependency=afterok:4712" in export and "RUN=r" in export
    assert subprocess.run(
        ["bash", script, "x.toml"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, timeout=240
    ).returncode


def test_surrounding_job_is_not_inherited() -> None:
    """A job around the submission does not affect the new one."""
    around = {
        "SLURM_MEM_PER_CPU": "1",
        "SLURM_JOB_ID": "7",
        "PMIX_RANK": "0",
        "OMPI_X": "1",
        "SLURM_CONF": "/c",
        "HOME": "/h",
    }
    assert of_another_job(around) == ["SLURM_MEM_PER_CPU", "SLURM_JOB_ID", "PMIX_RANK", "OMPI_X"]


def test_steps_get_the_environment() -> None:
    """SBATCH_EXPORT=NONE makes srun drop what the script exports, unless it is told otherwise."""
    site = SiteProfile()
    asked = request(Options(actor_num_gpus_per_node=1))
    text = render(BatchScript("n", "t", "s", "true", "o.out", "/l"), asked, site)
    assert all("--export=ALL" in line for line in text.splitlines() if line.startswith("export HPCRL_STEP_"))


def request(*stages: Options, **site: object) -> AllocationRequest:
    return make_request(stages, SiteProfile(**site))


def test_components_follow_from_the_stages_together() -> None:
    first = Options(actor_num_nodes=2, actor_num_gpus_per_node=4, loss_type="sft_loss", rollout_num_gpus=0)
    second = Options(actor_num_nodes=2, actor_num_gpus_per_node=8, rollout_num_gpus=16, rollout_num_gpus_per_engine=4)
    found = request(first, second)
    assert [(c.name, c.nodes, c.slots) for c in found.components] == [("trainer", 2, 8), ("engine", 2, 8)]
    found = request(first, second, rollout={"partition": "cpu", "cpus_per_node": 3})
    assert [(c.name, c.nodes, c.slots, c.cpus) for c in found.components][2:] == [("rollout", 1, 0, 3)]
    assert make_plan(second, found.hosts(), "r").rollout.host == "rollout-0"
    found = request(first, second, layout="homogeneous")
    assert [(c.nodes, c.slots) for c in found.components] == [(4, 8)]


EIGHT = {"gpus_per_node": 8, "partition": "gpu"}
FOUR = {"gpus_per_node": 4, "partition": "gpu"}


@pytest.mark.parametrize(
    ("trainers", "engines", "site", "expected"),
    [
        (4, 4, {"trainer": EIGHT, "engine": EIGHT}, [("trainer", 1, 8)]),
        (4, 4, {"trainer": EIGHT}, [("trainer", 1, 8)]),
        (4, 4, {"trainer": EIGHT, "engine": EIGHT, "layout": "heterogeneous"}, [("trainer", 1, 8)]),
        (2, 6, {"trainer": FOUR, "engine": FOUR}, [("trainer", 2, 4)]),
        (4, 4, {}, [("trainer", 1, 4), ("engine", 1, 4)]),
        (
            4,
            4,
            {"trainer": EIGHT, "engine": EIGHT, "rollout": {"partition": "cpu"}},
            [("trainer", 1, 8), ("rollout", 1, 0)],
        ),
        (8, 8, {"trainer": EIGHT, "engine": EIGHT | {"partition": "infer"}}, [("trainer", 1, 8), ("engine", 1, 8)]),
        (4, 0, {"trainer": EIGHT, "engine": EIGHT}, [("trainer", 1, 8)]),
    ],
)
def test_no_idle_nodes(
    trainers: int, engines: int, site: dict[str, object], expected: list[tuple[str, int, int]]
) -> None:
    """No node is requested that the plan leaves idle."""
    o = Options(
        actor_num_gpus_per_node=trainers, rollout_num_gpus=engines, rollout_num_gpus_per_engine=2 if engines else 1
    )
    found = request(o, **site)
    assert [(c.name, c.nodes, c.slots) for c in found.components] == expected
    assert {host.name for host in found.hosts()} == set(make_plan(o, found.hosts(), "r").hosts)


def test_engine_with_a_remainder_on_each_node() -> None:
    """An engine that leaves a remainder on each node gets more nodes."""
    o = Options(actor_num_gpus_per_node=1, rollout_num_gpus=9, rollout_num_gpus_per_engine=3)
    assert [(c.nodes, c.slots) for c in request(o).components[1:]] == [(2, 8)]
    with pytest.raises(UsageError, match="not fill nodes of 8"):
        request(
            Options(actor_num_gpus_per_node=1, rollout_num_gpus=12, rollout_num_gpus_per_engine=12),
            engine={"gpus_per_node": 8},
        )


@given(
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(0, 4),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.booleans(),
    st.booleans(),
)
def test_what_is_asked_for_holds_the_plan(
    nodes: int, each: int, engines: int, size: int, one_job: bool, colocate: bool
) -> None:
    o = Options(
        actor_num_nodes=nodes,
        actor_num_gpus_per_node=each,
        rollout_num_gpus=engines * size,
        rollout_num_gpus_per_engine=size,
        colocate=colocate,
    )
    try:
        found = request(o, layout="homogeneous" if one_job else "heterogeneous")
    except UsageError as error:
        assert one_job or colocate, error  # nodes of one kind cannot always hold engines larger than a node
        return
    plan = make_plan(o, found.hosts(), "r")
    assert len(plan.trainers) == nodes * each and len(plan.engines) == engines
    assert found.layout == ("homogeneous" if one_job or colocate else "heterogeneous")


@pytest.mark.parametrize(
    ("site", "values", "found"),
    [
        ({}, {}, [("trainer", 1, 1), ("engine", 1, 1), ("sandbox", 2, 0)]),
        ({"trainer": EIGHT}, {}, [("trainer", 1, 8), ("sandbox", 2, 0)]),
        ({}, {"colocate": True}, [("trainer", 1, 1), ("sandbox", 2, 0)]),
        (
            {"rollout": {"partition": "cpu"}},
            {},
            [("trainer", 1, 1), ("engine", 1, 1), ("rollout", 1, 0), ("sandbox", 2, 0)],
        ),
        ({"layout": "homogeneous", "trainer": EIGHT}, {}, [("trainer", 3, 8)]),
    ],
)
def test_nodes_with_sandboxes(
    site: dict[str, object], values: dict[str, object], found: list[tuple[str, int, int]]
) -> None:
    """A component of their own, which may lose a node, or more nodes of an ordinary job; its plan fits."""
    own = {"rollout_num_gpus": 1, "sandbox_on": "nodes", "sandbox_num_nodes": 2, **values}
    o = Options(actor_num_gpus_per_node=1, **own)
    asked = request(o, sandbox={"partition": "cpu", "cpus_per_node": 3}, **site)
    assert [(c.name, c.nodes, c.slots) for c in asked.components] == found
    assert asked.layout == site.get("layout", "heterogeneous")
    plan = make_plan(o, asked.hosts(), "r")
    assert len(plan.sandboxes) == 2 and plan.rollout.host not in {place.host for place in plan.sandboxes}
    where = SiteProfile(sandbox={"partition": "cpu", "cpus_per_node": 3}, **site)
    text = render(BatchScript("n", "t", "s", "true", "o.out", "launch"), asked, where)
    alone = [finding.what for finding in queued_again(asked)]
    assert len(alone) == (len(found) > 1) and all("trainer has one node" in what for what in alone)
    two = tuple(msgspec.structs.replace(component, nodes=2) for component in asked.components)
    assert not list(queued_again(msgspec.structs.replace(asked, components=two)))
    assert text.count("#SBATCH --no-kill") == len(found), "one is not enough: Slurm would end them all"
    if asked.layout == "heterogeneous":
        last = text.split("set -euo")[0].split("#SBATCH hetjob")[-1]
        assert "--partition=cpu" in last and "--cpus-per-task=3" in last and "--no-kill" in last


def test_time_for_saving() -> None:
    """The time for saving is the measured one, the minimum, or the site's."""
    o = Options(actor_num_gpus_per_node=1)
    assert request(o).margin == FLOOR
    assert make_request([o], SiteProfile(), 500).margin == 500
    assert request(o, signal_margin=77).margin == 77
    with pytest.raises(UsageError, match="4 is too short:.*120 s to start and 180 s to save.*ask for 5 minutes"):
        request(o, time="4")


@pytest.mark.parametrize(("way", "refused"), [("ipc", True), ("nccl", True), ("shm", False), ("auto", False)])
def test_gpu_weights_without_gpus(way: str, refused: bool) -> None:
    """Weights over GPUs are refused where the site has none."""
    o = Options(actor_num_gpus_per_node=2, colocate=True, rollout_num_gpus=2, weight_transfer=way)
    request(o, trainer={"gpus_per_node": 4})
    if refused:
        with pytest.raises(
            UsageError, match=rf"--weight-transfer {way} needs GPUs, .*trainer.gpus_per_node = 0\); use auto"
        ):
            request(o, trainer={"gpus_per_node": 0})
    else:
        request(o, trainer={"gpus_per_node": 0})


@pytest.mark.parametrize("key", ["account", "qos", "reservation", "mem"])
def test_what_sbatch_would_take_over_is_refused(key: str) -> None:
    """An option of the trainer's nodes alone would be one of the engines', too."""
    site = SiteProfile(layout="heterogeneous", trainer={key: "8"})
    script = BatchScript("n", "t", "s", "true", "o.out", "launch")
    asked = make_request([Options(actor_num_gpus_per_node=4, rollout_num_gpus=4)], site)
    with pytest.raises(UsageError, match=rf"trainer.{key} is set and engine.{key} .* set engine.{key}"):
        render(script, asked, site)
    render(script, asked, SiteProfile(layout="heterogeneous", trainer={key: "8"}, engine={key: "9"}))
    render(script, asked, SiteProfile(layout="heterogeneous", engine={key: "9"}))


def test_further_options_are_inherited_too() -> None:
    script = BatchScript("n", "t", "s", "true", "o.out", "launch")
    asked = make_request([Options(actor_num_gpus_per_node=4, rollout_num_gpus=4)], SiteProfile(layout="heterogeneous"))
    site = SiteProfile(layout="heterogeneous", trainer={"extra": {"nice": 7, "tmp": "1G"}})
    with pytest.raises(UsageError, match=r"trainer.extra.nice is set and engine.extra.nice .* set engine.extra.nice"):
        render(script, asked, site)
    render(script, asked, SiteProfile(layout="heterogeneous", trainer={"extra": {"tmp": "1G", "reboot": False}}))
    render(script, asked, SiteProfile(layout="heterogeneous", engine={"extra": {"nice": 7}}))


def test_options_of_a_component_are_its_own() -> None:
    site = SiteProfile(
        account="a", qos="q", exclusive=True, gpu_flag="gres", layout="heterogeneous",
        trainer={"partition": "gpu", "gpu_type": "h100", "mem": "0"}, engine={"partition": "infer", "account": "b", "mem": "9G", "extra": {"switches": "1@10"}},
    )  # fmt: skip
    o = Options(actor_num_nodes=2, actor_num_gpus_per_node=4, rollout_num_gpus=8)
    text = render(BatchScript("n", "t", "s", "true", "o.out", "launch"), make_request([o], site), site)
    first, second = text.split("set -euo")[0].split("#SBATCH hetjob")
    for word in (
        "account=a",
        "qos=q",
        "partition=gpu",
        "mem=0",
        "nodes=2",
        "gres=gpu:h100:4",
        "exclusive",
        "requeue",
        "signal=B:USR1@180",
    ):
        assert f"#SBATCH --{word}\n" in first, word
    for word in (
        "account=b",
        "qos=q",
        "partition=infer",
        "nodes=1",
        "gres=gpu:8",
        "exclusive",
        "switches=1@10",
        "mem=9G",
    ):
        assert f"#SBATCH --{word}\n" in second, word
    for word in ("time=", "requeue", "signal", "job-name", "output"):
        assert f"--{word}" not in second, word
    assert "--cpus-per-task" not in text  # whole nodes have all their cores


def test_containers_wrap_the_tasks() -> None:
    """Containers wrap the tasks and not the batch process."""
    o = Options(actor_num_gpus_per_node=1)
    for kind, word in (("pyxis", "--container-image=/x.sqsh"), ("apptainer", "apptainer exec --nv")):
        site = SiteProfile(container={"kind": kind, "image": "/x.sqsh" if kind == "pyxis" else "/x.sif"})
        text = render(
            BatchScript("n", "t", "s", "python -m x", "o.out", "/r/launch", mounts=("/r",)),
            make_request([o], site),
            site,
        )
        step = next(line for line in text.splitlines() if "HPCRL_STEP_0" in line)
        assert word in step and "/r/launch/task.sh" in step and "/r" in step
        assert text.splitlines()[-1] == "exec python -m x"


def test_sacct_of_a_heterogeneous_job() -> None:
    """sacct's rows of a heterogeneous job are one job in the worst state."""
    rows = "JobID|State|NodeList\n7+0|COMPLETED|a\n7+0.batch|COMPLETED|a\n7+0.0|COMPLETED|a\n7+1|NODE_FAIL|b\n8|RUNNING|c\n9+0|CANCELLED by 0|d\n"
    found = HetWatcher(delay_s=1).read_info(rows)
    assert {job: info["State"] for job, info in found.items()} == {"7": "NODE_FAIL", "8": "RUNNING", "9": "CANCELLED"}
    assert found["7"]["NodeList"] == "a,b"
    assert HetWatcher(delay_s=1).read_info("") == {}


def test_dry_run_submits_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run submits nothing and shows everything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", str(REPO / "examples/quickstart.toml"), "--dry-run", "--run-dir", "out"]) == 0
    out = capsys.readouterr().out
    assert "trainer  0" in out and "#SBATCH hetjob" in out and f"sbatch {tmp_path}/out/job.sbatch" in out
    assert not (tmp_path / "out").exists()
    assert main(["submit", str(REPO / "examples/quickstart.toml")]) == 2
    assert "no sbatch on this" in capsys.readouterr().err


def test_dry_run_without_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run says that Slurm did not answer and shows the rest."""
    for name in ("sbatch", "scontrol", "sinfo", "squeue"):
        (tmp_path / name).write_text("#!/bin/bash\necho 'Unable to contact slurm controller' >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["submit", str(REPO / "examples/quickstart.toml"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --nodes=1" in out and "would accept this" in out


@pytest.mark.parametrize(("kind", "image"), [("pyxis", "/x.sqsh"), ("apptainer", "/x.sif")])
def test_printed_script_mounts(
    kind: str, image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A printed script mounts its runs and its task's files."""
    monkeypatch.chdir(tmp_path)
    words = ["--print", "--set", f"container.kind={kind}", f"container.image={image}"]
    assert main(["submit", str(REPO / "examples/quickstart.toml"), *words]) == 0
    text = capsys.readouterr().out
    step = shlex.split(next(line for line in text.splitlines() if "HPCRL_STEP_0" in line).partition("=")[2])[0]
    assert str(tmp_path) in step, "the run's directory will lie there"
    task = Path(shlex.split(step)[-1])
    assert task.is_file() and str(task.parent) in step.replace(str(task), "")
    assert text.splitlines()[-1].startswith(f"exec {sys.executable} -m hpcrl.launch.slurm.batch_process"), (
        "outside of the image"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "trainer.partitoin=x"], "did you mean partition"),
        (["--set", "account"], "KEY=VALUE"),
        (["--site", "nosuch"], "no nosuch.toml"),
        (["--layout", "cubic"], "heterogeneous"),
        (["--nodes", "3"], "--nodes"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", str(REPO / "examples/quickstart.toml"), "--dry-run", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_without_a_site_the_missing_keys_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the commands that show them, and a profile of four lines that can be used as it is."""
    monkeypatch.delenv("HPCRL_SITE", raising=False)
    recipe = str(REPO / "examples/quickstart.toml")
    assert main(["submit", recipe, "--dry-run", "--set", "account=abc"]) == 0
    note, _, profile = capsys.readouterr().err.partition("--site mine.toml:\n")
    assert "trainer.partition, trainer.gpus_per_node;" in note and "sinfo" in note and "sacctmgr" not in note
    (tmp_path / "mine.toml").write_text(profile)
    assert len(profile.strip().splitlines()) == 4
    assert main(["submit", recipe, "--dry-run", "--site", str(tmp_path / "mine.toml")]) == 0
    said = capsys.readouterr()
    assert "--account=ACCOUNT" in said.out and "no --site" not in said.err


if __name__ == "__main__":  # make sbatch: write the golden files anew
    for name, words in PRINTED.items():
        done = subprocess.run(
            [sys.executable, "-m", "hpcrl", "submit", *words.split(), "--print"],
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        )
        (REPO / "sbatch" / name).write_text(in_checkout(done.stdout))
