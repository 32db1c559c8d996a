"""Hostile text in every option and every key of a site: refused, or a word of the script that nothing executes.

Each script is run by bash in the sandbox, with stand-ins for what it would start.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from hpcrl.config.flags import flag_words
from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe
from hpcrl.config.setting_names import kind_of_field
from hpcrl.errors import HpcrlError
from hpcrl.launch.container import Container
from hpcrl.launch.site import SiteProfile
from hpcrl.launch.site_file import apply, load_site
from hpcrl.launch.slurm.job_script import Submission
from hpcrl.launch.slurm.submission import preview
from hpcrl.launch.slurm.submit import preview_script, script_by_hand
from hpcrl.sandbox.run import RESULTS, run_confined
from hpcrl.utils.plain_text import CONTROL
from tests.support.able import needs

REPO = Path(__file__).parents[3]
RECIPE = REPO / "examples" / "quickstart.toml"
RUN = f"touch {RESULTS}/ran"
#: what a shell, an option parser or a terminal would obey
HOSTILE = (
    f"x\n{RUN}\n#",
    f"x; {RUN}; #",
    f"$({RUN})",
    f"`{RUN}`",
    f"';{RUN};'",
    f'";{RUN};"',
    f'"$({RUN})"',
    f"\\\";{RUN};\\'",
    f"x && {RUN} || {RUN}",
    f"x > {RESULTS}/ran",
    f"--wrap=touch {RESULTS}/ran",
    f"-oProxyCommand=touch {RESULTS}/ran",
    f"x\r{RUN}",
    "x\x1b]0;title\x07",
    "x\0y",
    f"\u2028{RUN}",
    f"${{x:-$({RUN})}}",
    f"/a$({RUN})",
    f"/a;{RUN}",
    f"$HOME;{RUN}",
    f"$HOME$({RUN})",
    f'$HOME"$({RUN})',
    f"/a`{RUN}`\\",
)  # fmt: skip
pytestmark = needs("namespaces")


def text_options() -> Iterator[tuple[str, bool]]:
    """(name, whether it takes several) of the options that take text."""
    for name, field in Options.model_fields.items():
        kind = kind_of_field(field)
        if kind.base in ("str", "object", "any") and not kind.choices:
            yield name, kind.many


def text_keys(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key of a site, how a text is put there) of all that take text, keys of tables included."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        key = f"{above}{name}"
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from text_keys(kind, f"{key}.")
        elif "dict" in str(kind):
            yield key, lambda text: {"NAME": text}
            yield key, lambda text: {text: "value"}
        elif "list" in str(kind):
            yield key, lambda text: [text]
        elif "str" in str(kind) or "Literal" in str(kind):
            yield key, lambda text: text


def run_scripts(scripts: list[tuple[str, str]], tmp_path: Path) -> list[str]:
    """The names of the scripts that did what their text says."""
    folder, results = tmp_path / "scripts", tmp_path / "results"
    for place in (folder, folder / "bin", results):
        place.mkdir()
    for name in ("srun", "module", "python", "python3", "scontrol"):
        (folder / "bin" / name).write_text("#!/bin/sh\nexit 0\n")
        (folder / "bin" / name).chmod(0o755)
    for number, (_, text) in enumerate(scripts):
        (folder / str(number)).write_text(text)
    loop = (
        f"cd /tmp; for ((n = 0; n < {len(scripts)}; n++)); do bash /scripts/$n > /dev/null 2>&1 < /dev/null; "
        f"[ -e {RESULTS}/ran ] && mv {RESULTS}/ran {RESULTS}/$n; done; touch {RESULTS}/end"
    )
    words = {"PATH": "/scripts/bin:/usr/bin:/bin", "HOME": "/home", "SLURM_JOB_ID": "7"}
    done = run_confined(["/bin/bash", "-c", loop], words, 300.0, (("/scripts", str(folder)),), results=str(results))
    found = {path.name for path in results.iterdir()}
    assert "end" in found, done
    return [scripts[int(name)][0] for name in found - {"end"}]


@pytest.fixture(scope="module")
def shown() -> Submission:
    """A submission that is not made."""
    return preview(load_recipe(RECIPE), {}, load_site("default"))


def scripts_of(submission: Submission, words: list[str]) -> Iterator[str]:
    """Each of the scripts that there are of one, and what it would be refused for is not in it."""
    for render in (lambda: script_by_hand(submission, words), lambda: preview_script(submission)):
        try:
            yield render()
        except HpcrlError:
            continue


def no_line_obeys(text: str) -> None:
    """What sbatch reads is one line an option, and no terminal obeys the script."""
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            assert len(shlex.split(line.removeprefix("#SBATCH "))) == 1, line


@pytest.mark.process
def test_options_are_words(shown: Submission, tmp_path: Path) -> None:
    """Every option that takes text, as a flag of a script for a person; name and directory in all scripts."""
    found = []
    for name, several in text_options():
        flags = [word for text in HOSTILE for word in flag_words({name: [text] if several else text})]
        if name not in ("name", "run_dir"):
            found.append((name, script_by_hand(shown, ["examples/quickstart.toml", *flags])))
            no_line_obeys(found[-1][1])
    assert len(found) > 50
    for name in ("name", "run_dir"):
        for text in HOSTILE:
            try:
                recipe = load_recipe(RECIPE)
                recipe = replace(recipe, name=text) if name == "name" else recipe
                submission = preview(recipe, {name: text}, load_site("default"))
            except HpcrlError:
                continue
            for script in scripts_of(submission, ["examples/quickstart.toml"]):
                no_line_obeys(script)
                assert not CONTROL.search(script)
                found.append((f"{name}: {text!r}", script))
    assert not run_scripts(found, tmp_path)


@pytest.mark.process
def test_keys_of_a_site_are_words(shown: Submission, tmp_path: Path) -> None:
    """All but `setup`, which holds shell; containers of each kind too."""
    found, keys = [], set()
    kinds = Container.model_fields["kind"].annotation.__args__
    for key, put in text_keys(SiteProfile):
        for text in HOSTILE:
            for kind in kinds if key.startswith("container.") else ("none",):
                values = {key: put(text)}
                if kind != "none" and key != "container.kind":
                    values = {"container.image": "/image.sif", "container.kind": kind, **values}
                    values = {"container": {name.partition(".")[2]: value for name, value in values.items()}}
                try:
                    site = apply(load_site("default"), values)
                except HpcrlError:
                    continue
                if key == "setup":
                    continue
                keys.add(key)
                for script in scripts_of(replace(shown, site=site), ["examples/quickstart.toml"]):
                    no_line_obeys(script)
                    assert not CONTROL.search(script)
                    found.append((f"{key}: {text!r}", script))
    assert {"scratch", "account", "env", "modules", "python", "container.image", "trainer.partition"} <= keys
    assert not run_scripts(found, tmp_path)


def test_scratch_expands_names_alone(shown: Submission) -> None:
    text = next(scripts_of(replace(shown, site=apply(shown.site, {"scratch": '$TMP/${A_B}/`"\\$1$(x)'})), ["x"]))
    assert re.search(r"(?m)^export TMPDIR=(.*)$", text)[1] == r'"$TMP/${A_B}/\`\"\\\$1\$(x)"'
