"""Every wait has a deadline: the code is walked for calls that may wait for ever, and each of those left has a
reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import nodes, walk

pytestmark = pytest.mark.lint
TESTS = Path(__file__).parent
ROOT = TESTS.parent / "hpcrl"
#: methods that wait for ever if they are given no time
WAITS = {"wait", "join", "communicate", "result", "recv", "recv_multipart", "recvfrom", "accept", "synchronize"}
#: functions that wait for ever unless `timeout` is given
TIMED = {"urlopen", "create_connection", "HTTPConnection", "HTTPSConnection"}
RUNS = {"run", "call", "check_call", "check_output"}

READY = "asked only of what is done, or has something to be read"
GROUP = "torch ends it after --distributed-timeout-minutes, or the group's own limit"
WATCHED = "who asked for it has a deadline, and ends the process"
OWN = "a Transfer waits no longer than its own deadline"
HERE = "a computation of this command, which waits for nobody"
SCRIPT = "hpcrl import ends the script, with all that it has started, when its time is over"
#: (file, call) -> what ends it
ENDED = {
    ("models/files/hf_writer.py", "job.result()"): HERE,
    ("weights/vllm_transfer.py", "joined.result()"): "a callback of what is done",
    (
        "config/slime/launcher.py",
        "subprocess.run(command, stdout=subprocess.PIPE if capture_output else None, text=True, check=False)",
    ): SCRIPT,
    ("config/slime/launcher.py", "subprocess.run(list(map(str, words)), check=False)"): SCRIPT,
    ("config/slime/launcher.py", "subprocess.call(command)"): SCRIPT,
    ("sandbox/slime_script.py", "process.wait()"): "the process was killed before",
    ("launch/node_checks/all_nodes.py", "process.communicate()"): "the process was killed in the line before",
    ("launch/node_checks/one_node.py", "listener.accept()"): "the listener has a timeout",
    ("engine/pieces/piece_receiver.py", "transfer.wait()"): OWN,
    ("engine/weight_loading.py", "torch.accelerator.synchronize()"): WATCHED,
    ("engine/health.py", "question.result()"): READY,
    ("transport/pickles/torch_patches.py", "socket.recv_multipart(copy=False)"): READY,
    ("transport/client.py", "self._socket.recv_multipart(copy=False)"): READY,
    ("transport/server.py", "self._socket.recv_multipart(copy=False)"): "it serves until it is closed",
    ("doctor/selftest/checks/collectives.py", "request.wait()"): WATCHED,
    ("doctor/selftest/checks/stream_order.py", "torch.cuda.synchronize()"): WATCHED,
    ("doctor/selftest/checks/logprob_memory.py", "torch.cuda.synchronize(device)"): WATCHED,
    ("doctor/selftest/this_host.py", "runs.result()"): WATCHED,
    ("doctor/selftest/whole_run.py", "process.wait()"): "the process was killed in the line before",
    ("planning/rehearsal/runner.py", "process.wait()"): "the process was killed in the line before",
    (
        "planning/rehearsal/process.py",
        "os.wait()",
    ): "planning/rehearsal/runner.py ends this process and its forks in time",
    ("trainer/checkpoint/writers.py", "self.mine.recv()"): READY,
    ("trainer/checkpoint/writers.py", "torch.cuda.synchronize()"): GROUP,
    ("trainer/megatron/hf_reading.py", "work.wait()"): GROUP,
    ("trainer/megatron/hf_weights.py", "work.wait()"): GROUP,
    ("trainer/megatron/hf_weights.py", "torch.cuda.current_stream().synchronize()"): GROUP,
    ("trainer/megatron/host_memory.py", "torch.cuda.synchronize()"): GROUP,
    ("doctor/selftest/checks/save_resume.py", "each.result()"): WATCHED,
    ("trainer/rank.py", "self.updates.wait()"): "its own deadline: --engine-start-timeout",
    ("doctor/selftest/checks/bandwidth.py", "torch.cuda.synchronize(device)"): GROUP,
    ("engine/membership/broadcast.py", "future.result()"): READY,
    ("engine/weight_receiver.py", "joined.result()"): READY,
    ("engine/weight_receiver.py", "self._hpcrl_joining.result()"): READY,
    ("rollout/slime_names/helpers.py", "asyncio.run_coroutine_threadsafe(coroutine, loop).result()"): WATCHED,
    ("weights/pieces/choose_transport.py", "joining.result()"): "it is done: the loop before ends when it is",
    ("weights/pieces/piece_sender.py", "transfer.wait()"): OWN,
    ("weights/pieces/piece_update.py", "future.result()"): READY,
    ("weights/pieces/peer_transport.py", "ending.result()"): READY,
    ("doctor/selftest/checks/large_save.py", "torch.cuda.synchronize(device)"): WATCHED,
    ("weights/pieces/device_transport.py", "starting.result()"): READY,
    ("weights/pieces/choose_transport.py", "joined.result()"): READY,
}


def endless(tree: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, call) of every call that may wait for ever, as far as it can be seen from its arguments.

    Tasks of an event loop wait for nobody but one another: what starts them has the deadline.
    """
    modules = {alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in tree if isinstance(node, ast.ImportFrom) and node.module}
    tasks = "asyncio" in modules and not modules & {"threading", "subprocess", "concurrent.futures", "multiprocessing"}
    waits = WAITS - {"result", "wait"} if tasks else WAITS
    for node in tree:
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        given = {keyword.arg for keyword in node.keywords}
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        of = function.value.id if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) else ""
        timed = bool(given & {"timeout", "seconds"})
        if (
            (
                isinstance(function, ast.Attribute)
                and name in waits
                and not timed
                and (not node.args or name == "synchronize")
            )
            or (name in TIMED and not timed)
            or (of == "subprocess" and name in RUNS and not timed)
        ):
            yield node.lineno, ast.unparse(node)


def test_no_call_waits_for_ever() -> None:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        for line, call in endless(nodes(path)):
            found[str(path.relative_to(ROOT)), call] = line
    new = [f"{file}:{line}: {call}" for (file, call), line in found.items() if (file, call) not in ENDED]
    assert not new, "give it a deadline, or say in ENDED what ends it"
    assert not ENDED.keys() - found.keys(), "these are gone"


def test_the_walk_sees_what_it_should() -> None:
    text = (
        "p.wait()\np.wait(3)\nt.join()\n','.join(x)\nt.join(timeout=1)\nsubprocess.run(a)\nsubprocess.run(a, "
        "timeout=1)\nurlopen(u)\n"
    )
    assert [line for line, _ in endless(walk(ast.parse(text)))] == [1, 3, 6, 8]


def test_tests_wait_for_children_within_a_time() -> None:
    """What a test has started may never end or say what is waited for; tests/support/children.py has `read_line`."""
    files = {path: nodes(path) for path in sorted(TESTS.rglob("*.py"))}
    found = [
        f"{path.relative_to(TESTS)}:{node.lineno}"
        for path, tree in files.items()
        for node in tree
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".stdout.readline")
    ]
    assert not found, "call read_line(process)"
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path, tree in files.items()
        for line, call in endless(tree)
        if call.startswith("subprocess.")
    ]
    assert not found, "give it a timeout"
