"""Every shipped recipe on every shipped site: a script that sbatch could read, and a true hint where there is none."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.errors import UsageError
from hpcrl.launch.allocation_request import Component, make_request
from hpcrl.launch.site import SiteProfile
from hpcrl.launch.site_file import load_site
from hpcrl.launch.site_nodes import fitted_nodes
from hpcrl.launch.slurm.partitions import steps_apart
from tests.launch.slurm.test_sites import SITES, filled

RECIPES = sorted((SITES.parent / "examples").glob("*gpu*.toml"))
#: profiles that leave nothing about their nodes open
KNOWN = [file for file in sorted(SITES.glob("*.toml")) if file.stem != "default"]
LAYOUT = ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus", "rollout_num_gpus_per_engine")


def test_there_are_as_many_as_are_shipped() -> None:
    assert len(RECIPES) == 9 and len(KNOWN) == 16


@pytest.mark.parametrize("file", KNOWN, ids=lambda path: path.stem)
def test_every_recipe_has_a_script(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The nodes of the script are the site's, whole ones, and hold the recipe's GPUs."""
    profile = filled(file.read_text(), tmp_path / file.name)
    site = load_site(str(profile))
    for recipe in RECIPES:
        assert main(["submit", str(recipe), "--site", str(profile), "--print"]) == 0
        text, said = capsys.readouterr()
        asked = [int(number) for number in re.findall(r"^#SBATCH --nodes=(\d+)$", text, re.MULTILINE)]
        values = load_recipe(recipe).values
        trainers = values["actor_num_nodes"] * values["actor_num_gpus_per_node"]
        total = trainers if values.get("colocate") else trainers + values["rollout_num_gpus"]
        assert asked == [-(-total // site.trainer.gpus_per_node)], recipe.stem
        assert ("note: --actor-num-nodes" in said) == (values["actor_num_gpus_per_node"] > site.trainer.gpus_per_node)
        step = next(line for line in text.splitlines() if "HPCRL_STEP_0=" in line)
        assert (site.rank_launcher == "ranks") != ("--mpi=none" in shlex.split(shlex.split(step.partition("=")[2])[0]))


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize(
    "flags",
    [
        {"actor_num_nodes": 1, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 8, "colocate": True},
        {"actor_num_nodes": 2, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 16, "rollout_num_gpus_per_engine": 8},
        {"actor_num_nodes": 1, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 6, "rollout_num_gpus_per_engine": 3},
        {
            "actor_num_nodes": 1,
            "actor_num_gpus_per_node": 6,
            "rollout_num_gpus_per_engine": 6,
            "rollout_num_gpus": 6,
            "colocate": True,
        },
    ],
    ids=["colocated", "apart", "threes", "sixes"],
)
def test_the_advice_of_a_refusal_renders_a_script(gpus: int, flags: dict[str, Any]) -> None:
    """What is refused with flags to give fits when they are given; where no flags are named, none would do."""
    site = SiteProfile(trainer={"gpus_per_node": gpus}, layout="homogeneous")
    try:
        make_request([Options(**flags)], site)
    except UsageError as error:
        advice = {name.replace("-", "_"): int(value) for name, value in re.findall(r"--([\w-]+) (\d+)", error.hint)}
        if advice:
            assert set(advice) <= set(LAYOUT)
            make_request([Options(**{**flags, **advice})], site)
        else:
            assert flags["actor_num_nodes"] * flags["actor_num_gpus_per_node"] % gpus, error


def test_stages_have_the_sites_nodes_each(tmp_path: Path) -> None:
    """A stage's own table counts; a flag wins; what does not divide stays as it is."""
    file = tmp_path / "r.toml"
    file.write_text(
        "actor_num_nodes = 2\nactor_num_gpus_per_node = 8\n"
        '[[stage]]\nname = "sft"\nloss_type = "sft_loss"\n[[stage]]\nname = "rl"\nactor_num_gpus_per_node = 6\n'
    )
    recipe = load_recipe(file)
    assert fitted_nodes(recipe, {}, 4) == {
        "sft.actor_num_nodes": 4,
        "sft.actor_num_gpus_per_node": 4,
        "rl.actor_num_nodes": 3,
        "rl.actor_num_gpus_per_node": 4,
    }
    assert set(fitted_nodes(recipe, {"rl.actor_num_nodes": 1}, 4)) == {
        "sft.actor_num_nodes",
        "sft.actor_num_gpus_per_node",
    }
    assert fitted_nodes(recipe, {"actor_num_nodes": 1}, 4) == {}
    assert set(fitted_nodes(recipe, {}, 5)) == set() == set(fitted_nodes(recipe, {}, None))


def test_nodes_of_two_kinds_make_a_heterogeneous_job() -> None:
    """An ordinary job only where one kind of node is described; a layout of the profile's own counts."""
    options = [Options(actor_num_gpus_per_node=4, rollout_num_gpus=8)]
    four = {"gpus_per_node": 4, "partition": "gpu"}

    def layout(**values: Any) -> str:
        return make_request(options, SiteProfile.model_validate(values)).layout

    assert layout(trainer=four) == layout(trainer=four, engine=four) == "homogeneous"
    assert layout(trainer=four, engine=four, layout="heterogeneous") == "heterogeneous"
    for other in ({"partition": "infer"}, {"mem": "0"}, {"constraint": "a100"}):
        assert layout(trainer=four, engine=four | other) == "heterogeneous"
    assert layout() == layout(trainer={"partition": "gpu"}) == "heterogeneous"
    assert layout(trainer=four, engine=four, rollout={"partition": "cpu"}) == "heterogeneous"


@pytest.mark.parametrize(
    ("interface", "names", "network", "said"),
    [
        ("hsn0", ("trainer", "engine"), None, "--layout homogeneous"),
        ("hsn", ("trainer", "engine", "rollout"), "def_tles=0", "--layout homogeneous"),
        ("hsn0", ("trainer", "engine"), "job_vni,def_tles=0", None),
        ("hsn0", ("engine",), "job_vni", "--weight-transfer gloo"),
        ("hsn0", ("trainer",), None, None),
        ("hsn0", ("trainer", "rollout"), None, None),
        ("ib0", ("trainer", "engine"), None, None),
        (None, ("engine",), None, None),
    ],
)
def test_steps_that_share_no_vni_are_warned_of(
    interface: str | None, names: tuple[str, ...], network: str | None, said: str | None
) -> None:
    wish = {"extra": {"network": network}} if network else {}
    site = SiteProfile.model_validate({"interface": interface, "trainer": wish, "engine": wish})
    found = list(steps_apart(site, [Component(name, 2, 0 if name == "rollout" else 4, 8) for name in names]))
    assert [finding.level for finding in found] == ["warn"] * (said is not None)
    assert said is None or said in found[0].hint


@pytest.mark.parametrize(
    "file", [file for file in KNOWN if 'interface = "hsn' in file.read_text()], ids=lambda p: p.stem
)
def test_slingshot_sites_start_everything_in_one_step(file: Path, tmp_path: Path) -> None:
    site = load_site(str(filled(file.read_text(), tmp_path / file.name)))
    for recipe in map(load_recipe, RECIPES):
        (options,) = resolve_stages(recipe, site.options(recipe, {}), {"run": "r", "prepared": "p"})
        assert not list(steps_apart(site, make_request([options], site).components)), recipe.name


def test_what_is_said_where_neither_layout_fits() -> None:
    """The hint of the ordinary job, which was tried first; and engines without a table have the trainers' nodes."""
    four = {"gpus_per_node": 4}
    site = SiteProfile.model_validate({"trainer": four, "engine": four})
    with pytest.raises(UsageError, match="give --actor-num-nodes 2 --actor-num-gpus-per-node 4"):
        make_request([Options(actor_num_gpus_per_node=8, rollout_num_gpus=4)], site)
    sixes = Options(actor_num_gpus_per_node=4, rollout_num_gpus=12, rollout_num_gpus_per_engine=6)
    alone = SiteProfile.model_validate({"trainer": four})
    with pytest.raises(UsageError, match="of 4 GPUs"):
        make_request([sixes], alone)
