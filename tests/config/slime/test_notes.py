"""What `hpcrl import` says besides arguments, and how arguments become the text of a recipe: pure functions, each case."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hpcrl.config.slime.arguments import split_flags, translate
from hpcrl.config.slime.mis_settings import mis_flags, reads_as_mis
from hpcrl.config.slime.script_notes import ENVIRONMENT, NEEDLESS, missed_file, notes_of, notes_of_variables
from hpcrl.config.slime.verbatim import WIDTH, name_of, recipe_text, split_arguments, split_program, summary
from hpcrl.errors import UsageError
from tests.support.able import needs


def test_a_line_for_each_kind_of_command() -> None:
    """Once; of Ray and of files by their first word, and with the reason why it is needless."""
    calls = [
        ["ray", "stop"],
        ["ray", "stop", "--force"],
        ["ray", "start"],
        ["pkill", "a"],
        ["pkill", "b"],
        ["mine", "x"],
    ]
    found = list(notes_of(calls, {"no_proxy": "x", "MINE": "y"}))
    assert [line.partition(":")[0] for line in found] == [
        "ray stop",
        "ray start",
        "pkill a",
        "mine x",
        "environment no_proxy",
    ]
    assert found[0].endswith(NEEDLESS["ray"]) and found[3] == "mine x: it was not run"
    assert found[4].endswith(ENVIRONMENT["no_proxy"])
    assert len(next(notes_of([["echo", "x" * 300]], {}))) < 130


@pytest.mark.parametrize("kind", ["source", "source-missing", "other"])
@pytest.mark.parametrize("folder", ["plain", "models"])
@pytest.mark.parametrize("there", [True, False])
def test_a_file_whose_settings_are_missed(kind: str, folder: str, there: bool, tmp_path: Path) -> None:
    """One that is there, that was not found, and that is no file of model arguments."""
    (tmp_path / folder).mkdir()
    if there:
        (tmp_path / folder / "x.sh").write_text("A=1\n")
    missed = kind == "source-missing" and folder == "plain" and there
    assert missed_file([kind, "x.sh", str(tmp_path / folder)]) == ("x.sh" if missed else "")
    assert missed_file([kind, "x.sh"]) == ""


def test_what_is_said_of_files_of_models(tmp_path: Path) -> None:
    """A family that is here needs none; where to look for one that was not found."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/mine.sh").write_text("")
    (tmp_path / "env.sh").write_text("")
    said = list(
        notes_of(
            [
                ["source", "/s/qwen3-4B.sh", "/"],
                ["source", "/s/glm5-744B-A40B.sh", "/"],
                ["source-missing", "nowhere.sh", "/"],
                ["source-missing", "mine.sh", f"{tmp_path}/models"],
                ["source-missing", "env.sh", str(tmp_path)],
            ],
            {},
        )
    )
    for line, parts in zip(
        said,
        (
            ("qwen3-4B is a qwen3 model", "no such file"),
            ("glm5-744B-A40B belongs to no model",),
            ("--models-dir DIR names",),
            (f"--models-dir {tmp_path}/models shows it", "hidden"),
            ("not read", "write NAME=VALUE"),
        ),
        strict=True,
    ):
        assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("echo $A ${B}", "A, B"),
        ("A=1\necho $A", ""),
        ("export A=1; echo $A", ""),
        ("for A in 1 2; do echo $A; done", ""),
        ("read -r A; echo $A", ""),
        ("A+=(1)\necho $A", ""),
        ("# $A\necho x", ""),
        ("echo $HOME $GIVEN", ""),
        ("echo ${A:-3}", ""),
        ("echo $A\necho $A", "A"),
    ],
)
def test_variables_that_nothing_sets(text: str, missing: str) -> None:
    found = [note for note in notes_of_variables(text, {"GIVEN": "1"}, launcher=False) if " sets " in note]
    assert [line.split(" sets ")[1].split(", which")[0] for line in found] == ([missing] if missing else [])


def test_variables_that_may_be_given_in_vain() -> None:
    given = {"A": "1", "steps": "2", "SLIME_SCRIPT_STEPS": "3", "stepz": "4", "SLIME_SCRIPT_X": "5"}
    found = list(notes_of_variables("os.environ['A']; steps: int = 3", given, launcher=True))
    assert [note.split()[0] for note in found] == ["stepz", "SLIME_SCRIPT_X"]


def test_words_before_and_behind() -> None:
    assert split_arguments(["a", "--", "b", "--", "c"]) == (["a"], ["b", "--", "c"])
    assert split_arguments(["a", "b"]) == (["a", "b"], None)
    assert split_program(["python3", "/x/train_async.py", "--lr", "1"]) == ("train_async.py", ["--lr", "1"])
    assert split_program(["train.py", "--lr", "1"]) == ("train.py", ["--lr", "1"])
    assert split_program(["--lr", "train_async.py"]) == ("train.py", ["--lr", "train_async.py"])
    assert split_program(["my_train.py", "--lr", "1"]) == ("train.py", ["my_train.py", "--lr", "1"])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/m/Qwen3-4B/", "qwen3-4b"),
        ("/m/.My Model!.", "my-model"),
        ("", "arguments"),
        ("/m/---", "arguments"),
    ],
)
def test_a_name_for_the_run(path: str, name: str) -> None:
    assert name_of(["--hf-checkpoint", path]) == name
    assert name_of(["--lr", "1"]) == name_of(["stray"]) == "arguments"


@needs("namespaces")
def test_text_of_a_recipe() -> None:
    """Lines of comments are broken between words, words of any length stay whole, and TOML reads the values back."""
    words = "--hf-checkpoint /m --lr 1e-6 --use-tensorboard --use-score-centering --moe-z-loss-coeff 0.1 --vllm-max-num-seqs 3"
    found = translate(words.split())
    notes = ["w " * 100, "x" * (WIDTH + 10)]
    text = recipe_text(found, 'a "name"', "about " * 40, notes)
    read = tomllib.loads(text)
    assert read["name"] == 'a "name"' and read["lr"] == 1e-6 and read["vllm"] == {"max_num_seqs": 3}
    assert read["megatron"] == {"moe_z_loss_coeff": 0.1}
    lines = text.splitlines()
    assert max(len(line) for line in lines if "x" * 99 not in line) <= WIDTH
    assert max(map(len, lines)) > WIDTH and not any(line != line.rstrip() for line in lines)
    assert any(line.startswith("# What cannot be honoured") for line in lines)
    assert any(line.startswith("# What is needless") for line in lines) and "# What else the script" in text
    assert not any("has another name" in line for line in lines), "nothing was translated"
    told = summary(found)
    assert any(line.startswith("refused: --use-score-centering") for line in told)
    assert any(line.startswith("set: --weight-decay") for line in told), "a default of slime's is told"
    assert not any("--lr 1e-6" in line for line in told)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--a 1 2 --b", {"a": ["1", "2"], "b": []}),
        ("--a=1 --a 2", {"a": ["2"]}),
        ("--a -1 --b=--c", {"a": ["-1"], "b": ["--c"]}),
        ("--a_b 1", {"a-b": ["1"]}),
    ],
)
def test_words_of_flags(words: str, found: dict[str, list[str]]) -> None:
    assert {flag: list(values) for flag, values in split_flags(words.split()).items()} == found


def test_a_stray_word_is_named() -> None:
    with pytest.raises(UsageError, match="stray"):
        split_flags(["stray", "--a", "1"])


MIS = {"tis_level": "token", "tis_mode": "truncate", "tis_upper_bound": 2.0}


def written(path: Path, **settings: object) -> str:
    lines = [f"{name}: {str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("settings", "asked", "words"),
    [
        ({}, True, "--tis-level token --tis-mode truncate --tis-clip 2.0"),
        ({"tis_mode": "clip"}, True, "--tis-level token --tis-mode clip --tis-clip 2.0 --tis-clip-low 0.5"),
        ({"tis_mode": "mask", "tis_lower_bound": 0.7}, True, "--tis-level token --tis-mode mask --tis-clip 2.0 --tis-clip-low 0.7"),
        ({"use_rs": True, "rs_level": "sequence", "rs_upper_bound": 3.0}, True, "--tis-level token --tis-mode truncate --tis-clip 2.0 --use-rs --rs-level sequence --rs-upper-bound 3.0"),
        ({"rs_level": "sequence"}, True, "--tis-level token --tis-mode truncate --tis-clip 2.0"),
        ({"tis_batch_normalize": True, "use_tis": True}, False, "--tis-level token --tis-mode truncate --tis-clip 2.0 --tis-batch-normalize"),
        ({"use_tis": False}, False, None),
        ({}, False, None),
    ],
)  # fmt: skip
def test_words_of_a_correction(settings: dict[str, object], asked: bool, words: str | None, tmp_path: Path) -> None:
    found = mis_flags(written(tmp_path / "m.yaml", **MIS | settings), asked)
    assert found == (() if words is None else ("--use-tis", *words.split()))


@pytest.mark.parametrize("name", ["tis_upper_bound", "tis_lower_bound", "rs_lower_bound", "rs_veto_threshold"])
@pytest.mark.parametrize("value", [0, -1.0, True, "high"])
def test_bounds_are_numbers_above_zero(name: str, value: object, tmp_path: Path) -> None:
    path = written(tmp_path / "m.yaml", **MIS | {"use_rs": True, "rs_level": "token", name: value})
    with pytest.raises(UsageError, match=name):
        mis_flags(path, True)


def test_paths_of_the_example() -> None:
    assert reads_as_mis("mis") and reads_as_mis("examples.train_infer_mismatch_helper.mis.compute_mis_weights")
    assert not reads_as_mis("mine.compute_mis_weights") and not reads_as_mis("examples.x.compute")
