"""The commit around a recipe, as git itself says it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcrl.launch.user_code.directories import commit_of
from tests.support.able import needs

pytestmark = needs("git")


def git(folder: Path, *words: str) -> str:
    """What git says, for a committer of its own and with no settings of this machine."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    who = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *who, "-C", str(folder), *words], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "recipes").mkdir(parents=True)
    git(folder, "init", "--quiet")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", "first")
    return folder


def test_the_commit_that_is_checked_out(repository: Path, tmp_path: Path) -> None:
    """On a branch, packed, detached, and in a worktree of its own."""
    head = git(repository, "rev-parse", "HEAD")
    assert commit_of(repository / "recipes") == head
    git(repository, "pack-refs", "--all")
    assert commit_of(repository) == head
    git(repository, "worktree", "add", "--quiet", "-b", "other", str(tmp_path / "other"))
    git(tmp_path / "other", "commit", "--quiet", "--allow-empty", "-m", "second")
    assert commit_of(tmp_path / "other") == git(tmp_path / "other", "rev-parse", "HEAD") != head
    git(tmp_path / "other", "pack-refs", "--all")
    assert commit_of(tmp_path / "other") != head
    git(repository, "checkout", "--quiet", "--detach")
    assert commit_of(repository) == head


def test_nothing_where_it_cannot_be_told(repository: Path, tmp_path: Path) -> None:
    (repository / ".git" / "HEAD").write_text("ref: refs/heads/none\n")
    assert commit_of(repository) == ""
    (repository / ".git" / "HEAD").write_bytes(b"\xff\xfe")
    assert commit_of(repository) == "" and commit_of(tmp_path) == commit_of(tmp_path / "absent") == ""
