"""SiteProfile profiles: what a file may say, where it is found, and how a container is started."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpcrl
from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe
from hpcrl.errors import UsageError
from hpcrl.launch.allocation_request import make_request
from hpcrl.launch.container import Container
from hpcrl.launch.site import ComponentProfile, SiteProfile, minutes
from hpcrl.launch.site_file import apply, find_profile, from_flags, load_site, profile_names
from hpcrl.launch.slurm.job_script import BatchScript
from hpcrl.launch.slurm.submit import render
from tests.support.able import require

SITES = Path(__file__).parents[3] / "sites"


@pytest.fixture(autouse=True)
def _no_profiles_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("HPCRL_SITE", "HPCRL_SITES"):
        monkeypatch.delenv(name, raising=False)


# ---- time


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90),
        ("90:00", 90),
        ("90:01", 91),
        ("1:30:00", 90),
        ("0:00:01", 1),
        ("1-0", 1440),
        ("1-2", 1560),
        ("1-2:30", 1590),
    ],
)
def test_minutes_reads_every_form_of_slurm(text: str, expected: int) -> None:
    assert minutes(text) == expected


@given(st.integers(0, 30), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_minutes_of_the_full_form(days: int, hours: int, mins: int, seconds: int) -> None:
    text = f"{days}-{hours:02}:{mins:02}:{seconds:02}"
    total = ((days * 24 + hours) * 60 + mins) * 60 + seconds
    if total == 0:
        with pytest.raises(UsageError, match="needs a time limit"):
            minutes(text)
    else:
        assert 0 <= minutes(text) * 60 - total < 60


@pytest.mark.parametrize("text", ["", "UNLIMITED", "1h", "-5", "1:2:3:4", "1-", "0", "0:00:00", "1.5"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        minutes(text)


# ---- the files that come along


def filled(text: str, where: Path) -> Path:
    """A profile with its placeholders filled in; what stands for a path gets one."""
    where.write_text(
        re.sub(r"<([^<>\n]*)>", lambda m: "/filled" if re.search("path|directory", m[1]) else "filled", text)
    )
    return where


@pytest.mark.parametrize("file", sorted(SITES.glob("*.toml")), ids=lambda p: p.stem)
def test_examples_are_profiles_once_filled_in(file: Path, tmp_path: Path) -> None:
    text = file.read_text()
    if "<" in re.sub(r"#.*", "", text):
        with pytest.raises(UsageError, match="placeholder <.*copy the file and fill"):
            load_site(str(file))
    site = load_site(str(filled(text, tmp_path / file.name)))
    assert site.name == file.stem


CONTAINERS = {
    "as it is": {},
    "none": {"container": {"kind": "none"}},
    "pyxis": {"container": {"kind": "pyxis", "image": "/it's.sqsh", "mounts": ["/a b"], "workdir": "/w"}},
    "container-engine": {"container": {"kind": "container-engine", "image": "/it's.toml"}},
    "apptainer": {"container": {"kind": "apptainer", "image": "/it's.sif", "mounts": ["/a b:/c:ro"], "writable": True}},
    "singularity": {"container": {"kind": "singularity", "image": "docker://x", "gpus": "amd"}},
    "shifter": {
        "container": {"kind": "shifter", "image": "docker:x", "modules": ["gpu", "nccl-plugin"], "mounts": ["/a"]}
    },
}


@pytest.mark.parametrize("file", sorted(SITES.glob("*.toml")), ids=lambda p: p.stem)
def test_every_layout_and_container(file: Path, tmp_path: Path) -> None:
    """bash and shellcheck have nothing to say, and each step's words come out of the shell as they went in."""
    base = load_site(str(filled(file.read_text(), tmp_path / file.name)))
    scripts = []
    for layout in ("heterogeneous", "homogeneous"):
        for name, values in CONTAINERS.items():
            site = SiteProfile.model_validate(
                {**base.model_dump(), "layout": layout, "setup": ["conda activate x"], **values}
            )
            options = Options(actor_num_nodes=2, actor_num_gpus_per_node=1, rollout_num_gpus=2)
            text = render(
                BatchScript("n", "it's", "s", "true", "o", "/run/launch", mounts=("/r un",)),
                make_request([options], site),
                site,
            )
            scripts.append(tmp_path / f"{layout}-{name.replace(' ', '-')}.sh")
            scripts[-1].write_text(text)
            step = shlex.split(
                shlex.split(next(x for x in text.splitlines() if "HPCRL_STEP_0" in x).partition("=")[2])[0]
            )
            assert step[0] == "srun" and step[-1] == "/run/launch/task.sh" and all("<" not in word for word in step)
    subprocess.run(
        ["bash", "-c", 'for file; do bash -n "$file" || exit 1; done', "bash", *map(str, scripts)],
        check=True,
        timeout=240,
    )
    require("shellcheck")
    done = subprocess.run(
        ["shellcheck", "--shell=bash", *map(str, scripts)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[:3000]


@pytest.mark.parametrize("file", sorted(SITES.glob("*.toml")), ids=lambda p: p.stem)
def test_every_site_has_the_keys_that_a_run_needs(file: Path, tmp_path: Path) -> None:
    if file.stem in ("default", "pyxis", "apptainer"):
        return
    text = file.read_text()
    site = load_site(str(filled(file.read_text(), tmp_path / file.name)))
    assert site.trainer.gpus_per_node and site.engine.gpus_per_node, "nodes of a known size"
    assert "Source" in text, "where each key comes from"
    if "hsn" in text:
        assert site.interface == "hsn0", "one interface gives the address; NCCL may have them all"


#: processors that Slurm gives a job on one node of it, as each profile's sources say: cores, less those kept for the
#: system
PROCESSORS = {
    "alliance": 48,
    "alps": 288,
    "delta": 64,
    "deltaai": 288,
    "frontier": 56,
    "isambard-ai": 288,
    "jeanzay": 96,
    "jupiter": 288,
}
PROCESSORS |= {"juwels": 96, "leonardo": 32, "lumi": 56, "marenostrum5": 80, "perlmutter": 128, "vista": 72}


@pytest.mark.parametrize("file", sorted(SITES.glob("*.toml")), ids=lambda p: p.stem)
def test_processors_of_the_nodes(file: Path, tmp_path: Path) -> None:
    """No site asks for more processors than its nodes have."""
    site = load_site(str(filled(file.read_text(), tmp_path / file.name)))
    gpus = site.trainer.gpus_per_node or 8
    options = Options(
        actor_num_nodes=2, actor_num_gpus_per_node=gpus, rollout_num_gpus=2 * gpus, rollout_num_gpus_per_engine=1
    )
    request = make_request([options], site)
    text = render(BatchScript("n", "t", "s", "true", "o", "/l"), request, site)
    asked = [int(number) for number in re.findall(r"--cpus-per-task=(\d+)", text)]
    if file.stem in PROCESSORS:
        assert set(asked) == {PROCESSORS[file.stem]}, "all that whole nodes give"
    else:  # a profile for nodes that it does not know: those of whole nodes are not counted
        assert site.exclusive != bool(asked) and all(number <= 64 for number in asked)


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        ("shifter", {"gpus": "amd"}, "effect with kind shifter"),
        (
            "container-engine",
            {"mounts": ["/a"]},
            "effect with kind container-engine",
        ),
        ("apptainer", {"modules": ["gpu"]}, "effect with kind apptainer"),
        ("pyxis", {"gpus": "none"}, "effect with kind pyxis"),
    ],
)
def test_a_container_refuses_what_it_does_not_know(kind: str, values: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Container.model_validate({"kind": kind, "image": "/x.sif", **values})


def test_how_each_container_is_started() -> None:
    def words(**values: object) -> list[str]:
        more, command = Container.model_validate({"image": "/x.sif", **values}).wrap(["bash", "t.sh"], ("/run",))
        return [*more, "|", *command]

    assert words(kind="singularity")[:3] == ["|", "singularity", "exec"]
    assert words(kind="shifter", modules=["gpu"]) == [
        "|", "shifter", "--image=/x.sif", "--module=gpu", "--volume=/run:/run", "bash", "t.sh"
    ]  # fmt: skip
    assert words(kind="container-engine")[0] == "--environment=/x.sif" and words(kind="container-engine")[-2:] == [
        "bash",
        "t.sh",
    ]


def test_nodes_that_come_with_gpus() -> None:
    """Nodes that come with their GPUs are asked for none."""
    site = SiteProfile(gpu_flag="none", trainer={"gpus_per_node": 1}, mark=False, launch_timeout=900)
    text = render(
        BatchScript("n", "t", "s", "true", "o", "/l", identity="id"),
        make_request([Options(actor_num_gpus_per_node=1)], site),
        site,
    )
    assert "--gres" not in text and "--gpus" not in text and "comment" not in text and "HPCRL_SLOTS_0=1" in text
    assert "HPCRL_LAUNCH_TIMEOUT=900 " in text and "HPCRL_SHARED_NODES" not in text and "HPCRL_TASKS" not in text


def test_extra_option_without_a_value() -> None:
    """An extra option without a value can be set on the command line."""
    site = apply(
        SiteProfile(),
        {"trainer.extra.hold": "true", "trainer.extra.switches": "1@10", "engine.extra.spread-job": "false"},
    )
    assert site.trainer.extra == {"hold": True, "switches": "1@10"} and site.engine.extra == {"spread-job": False}


def test_default_toml_is_the_default() -> None:
    """default.toml is the built-in default and names every key."""
    assert load_site("default") == load_site(None) == SiteProfile()
    text = (SITES / "default.toml").read_text()
    for model in (SiteProfile, ComponentProfile, Container):
        for key in model.model_fields:
            assert key == "name" or re.search(rf"^(# )?\[?{key}\]?( =|$| )", text, re.MULTILINE), key


def test_commented_keys_of_default_toml(tmp_path: Path) -> None:
    """Commented keys of default.toml are good examples."""
    text = (SITES / "default.toml").read_text().replace('kind = "none"', 'kind = "apptainer"')
    file = tmp_path / "all.toml"
    file.write_text(re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE))
    site = load_site(str(file))
    assert site.account == "myproject" and site.trainer.extra == {"switches": 1} and site.container.image


# ---- finding


def test_a_name_is_looked_up_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, account in (("a", "first"), ("b", "second"), ("config/hpcrl/sites", "third")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "mine.toml").write_text(f'account = "{account}"')
    assert load_site("mine").account == "third"
    monkeypatch.setenv("HPCRL_SITES", f"{tmp_path / 'none'}:{tmp_path / 'b'}:{tmp_path / 'a'}")
    assert load_site("mine").account == "second" and find_profile("mine") == tmp_path / "b" / "mine.toml"
    monkeypatch.setenv("HPCRL_SITE", "mine")
    assert load_site(None).account == "second"
    assert load_site(str(tmp_path / "a" / "mine.toml")).account == "first"
    assert {"mine", "default", "pyxis"} <= set(profile_names())


def test_an_unknown_site_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--site fronteer: .*did you mean frontier\?"):
        load_site("fronteer")
    with pytest.raises(UsageError, match="read the site profile"):
        load_site(str(tmp_path / "absent.toml"))


# ---- what a file may say


def load(tmp_path: Path, text: str) -> SiteProfile:
    file = tmp_path / "x.toml"
    file.write_text(text)
    return load_site(str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('acount = "x"', "did you mean account?"),
        ('[trainer]\npartitoin = "x"', "did you mean partition?"),
        ("[trainer]\ngpus_per_node = '8'", "should be a valid"),
        ("[trainer]\ngpus_per_node = -1", "trainer.gpus_per_node = -1"),
        ('trainer = "gpu"', "trainer = "),
        ("account = 5", "should be a valid"),
        ('time = "1h"', "time: time 1h: not a time"),
        ('layout = "het"', "'heterogeneous' or 'homogeneous'"),
        ('account = "a\\nb"', "account holds a control"),
        ('[env]\nA = "x\\u0007"', "env.A holds a control character"),
        ('[env]\n"A B" = "x"', "name of an environment"),
        ('setup = ["a\\nb"]', "setup holds a control"),
        ('account = "<your project>"', "still the placeholder <your project>"),
        ('srun = ["--mpi", "none"]', "not an option; write --name=value as one word"),
        ("[trainer.extra]\nnodes = 3", "set by hpcrl; use --actor-num-nodes"),
        ('[engine.extra]\noutput = "x"', "engine: extra.output is set by hpcrl"),
        ('[engine.extra]\ncomment = "x"', "engine: extra.comment is set by hpcrl"),
        ('[trainer.extra]\nexport = "NONE"', "trainer: extra.export is set by hpcrl"),
        (
            '[engine.extra]\naccount = "x"',
            "extra.account is set by hpcrl",
        ),
        ('[trainer.extra]\n"--foo" = 3', "name of an sbatch"),
        ('[container]\nmounts = ["/a"]', "effect with kind none"),
        ('[container]\nkind = "pyxis"', "pyxis needs an image"),
        ('[container]\nkind = "pyxis"\nimage = "a.sqsh"', "begin a path with / or ./"),
        ('[container]\nkind = "apptainer"\nimage = "a.sif"', "begin a path with / or ./"),
        ('[container]\nkind = "pyxis"\nimage = "/a"\nmounts = ["x:/y"]', "mounts: x:/y is not"),
        ('[container]\nkind = "pyxis"\nimage = "/a"\nmounts = ["/x,/y"]', "mounts: /x,/y is not"),
        ("signal_margin = 10", "signal_margin = 10"),
        ("time = ", "is not TOML"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value) and "x.toml" in str(caught.value) and "\n" not in str(caught.value)


def test_shell_in_setup_is_no_placeholder(tmp_path: Path) -> None:
    assert load(tmp_path, 'setup = ["source <(cat /x) ", "cat < /in > /out"]').setup


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12))
def test_a_value_stays_as_it_is_or_is_refused(value: str) -> None:
    try:
        assert load_site(None, {"env": {"A": value}}).env == {"A": value}
    except UsageError:
        assert any(ord(c) < 32 or ord(c) == 127 for c in value) or ("<" in value and ">" in value)


# ---- overrides


def test_values_are_replaced_by_dotted_key() -> None:
    site = load_site(
        None, {"trainer.partition": "gpu", "trainer.gpus_per_node": "8", "requeue": "false", "account": "123"}
    )
    assert (
        site.trainer == ComponentProfile(partition="gpu", gpus_per_node=8)
        and not site.requeue
        and site.account == "123"
    )
    other = apply(site, {"trainer.mem": "0", "srun": '["--mpi=none"]', "env.NCCL_DEBUG": "1", "max_requeues": 3})
    assert other.trainer == ComponentProfile(partition="gpu", gpus_per_node=8, mem="0") and other.srun == ["--mpi=none"]
    assert apply(site, {"trainer.extra.hold": "true", "env.A": "true"}).trainer.extra == {"hold": True}, (
        "without a value"
    )
    assert other.env == {"NCCL_DEBUG": "1"} and other.max_requeues == 3 and site.srun == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("trainer.partitoin", "x", "did you mean partition"),
        ("tariner.partition", "x", "did you mean trainer"),
        ("trainer.gpus_per_node", "many", 'trainer.gpus_per_node = "many"'),
        ("account", "<your project>", "placeholder"),
        ("trainer", "x", "trainer"),
        ("account.x", "y", "account"),
    ],
)
def test_a_wrong_override_is_refused(key: str, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        apply(SiteProfile(), {key: value})


def test_a_wrong_value_of_the_command_line_is_its_own() -> None:
    """Not that of the file which the other values are from."""
    with pytest.raises(UsageError, match=r"^--set: signal_margin = 45: "):
        load_site("default", {"signal_margin": "45"})


def test_a_wrong_time_limit_is_the_flags_fault() -> None:
    with pytest.raises(UsageError) as caught:
        from_flags({"time": "12h"})
    assert str(caught.value).startswith("--time 12h: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"num_rolout": 3}, "did you mean --num-rollout?"),
        ({"set": {"trainer.partitoin": "x"}}, "did you mean partition?"),
        ({"time": "1h"}, "time"),
        ({"layout": "cubic"}, "layout"),
    ],
)
def test_from_python_too_what_is_wrong_is_one_line(
    words: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError) as caught:
        hpcrl.submit(SITES.parent / "examples" / "quickstart.toml", **words)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_override_fills_in_a_placeholder(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('account = "<your project>"')
    assert load_site(str(file), {"account": "abc"}).account == "abc"
    assert from_flags({"site": str(file), "set": ["account=a=b"], "time": "10"}).account == "a=b"
    with pytest.raises(UsageError, match="expected KEY=VALUE"):
        from_flags({"set": ["account"]})


def test_a_site_survives_its_dump() -> None:
    site = load_site(None, {"container": {"kind": "pyxis", "image": "/x"}, "trainer.partition": "gpu"})
    for each in (site, SiteProfile()):
        assert SiteProfile.model_validate(each.model_dump()) == each


def test_gpus_are_asked_for_as_the_site_wants() -> None:
    site = load_site(None, {"engine.gpu_type": "h100"})
    assert site.gpus("trainer", 8) == "gpus-per-node=8" and site.gpus("engine", 4) == "gpus-per-node=h100:4"
    site = apply(site, {"gpu_flag": "gres"})
    assert site.gpus("trainer", 8) == "gres=gpu:8" and site.gpus("engine", 4) == "gres=gpu:h100:4"
    assert site.gpus("rollout", 0) is None


def test_site_options_give_way(tmp_path: Path) -> None:
    """Options of a site give way to recipe and flags."""
    (tmp_path / "r.toml").write_text("lr = 1e-4")
    recipe = load_recipe(tmp_path / "r.toml")
    site = SiteProfile(interface="ib0")
    assert site.options(recipe, {"seed": 1}) == {"interface": "ib0", "seed": 1}
    assert site.options(recipe, {"interface": "eth0"}) == {"interface": "eth0"}
    assert SiteProfile().options(recipe, {}) == {}


# ---- containers


def test_without_a_container_nothing_changes() -> None:
    assert SiteProfile(srun=["--mpi=none"]).wrap(["a", "b"], ("/run",)) == (["--mpi=none"], ["a", "b"])


def test_pyxis_takes_the_container_from_srun() -> None:
    container = Container(kind="pyxis", image="/i.sqsh", mounts=["/s", "/a:/b:ro"], args=["--container-remap-root"])
    extra, command = container.wrap(["python", "-m", "x"], ("/run",), ("A", "B"))
    assert extra == [
        "--container-image=/i.sqsh",
        "--container-mounts=/s:/s,/a:/b:ro,/run:/run",
        "--no-container-mount-home",
        "--container-env=A,B",
        "--container-remap-root",
    ]
    assert command[0] == "bash" and command[-3:] == ["python", "-m", "x"]


def test_command_in_a_pyxis_container() -> None:
    """The command in a Pyxis container is the same, word for word."""
    words = ["a b", "$HOME", '"', "'", "*", "", "\\"]
    _, command = Container(kind="pyxis", image="/i").wrap(["printf", "%s\\n", *words])
    assert shutil.which("bash")
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout.split("\n")[:-1]
        == words
    )


def test_apptainer_is_an_ordinary_command() -> None:
    container = Container(
        kind="apptainer", image="/i.sif", mounts=["/s"], workdir="/s", writable=True, args=["--cleanenv"]
    )
    assert container.wrap(["python"], ("/s", "/run"), ("A",)) == (
        [],
        [
            "apptainer",
            "exec",
            "--nv",
            "--bind",
            "/s",
            "--bind",
            "/run",
            "--pwd",
            "/s",
            "--no-home",
            "--writable-tmpfs",
            "--cleanenv",
            "/i.sif",
            "python",
        ],
    )
    amd = Container(kind="apptainer", image="docker://x", gpus="amd", mount_home=True)
    assert amd.wrap(["a"])[1] == ["apptainer", "exec", "--rocm", "docker://x", "a"]
