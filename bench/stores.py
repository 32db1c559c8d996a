"""Where trainer ranks meet: our store next to torch's TCPStore, which torchrun's ranks meet in, asked the same.

    python bench/stores.py [--ranks 64,512]

Every rank puts its own address into two groups and looks up those of its log2 N peers in each (bench/hosts.py).  Both
servers are processes of their own; told are CPU seconds of the server alone, since the clients of torch's are made one
after another here.  Ours proves with keys who is there and encrypts; TCPStore takes keys and values from anybody who connects.

Bound that is checked: our server takes at most 10 times the CPU of torch's, and under 60 s.
Writes bench/results/stores.md; the last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

REPO = Path(__file__).parent.parent
sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

from torch.distributed import TCPStore  # noqa: E402

from bench.hosts import ranks_meet  # noqa: E402
from hpcrl.run.process import raise_file_limit  # noqa: E402

SERVER = """
import sys, time
from torch.distributed import TCPStore
from hpcrl.run.process import raise_file_limit
raise_file_limit()
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
begun = time.process_time()
print(store.port, flush=True)
sys.stdin.read()
print(time.process_time() - begun, flush=True)
"""


def torch_meets(ranks: int) -> dict[str, float]:
    """The same requests of as many clients of a TCPStore."""
    words = [sys.executable, "-c", SERVER]
    with subprocess.Popen(words, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdin is not None
        port = int(server.stdout.readline())
        wait = timedelta(seconds=60)
        clients = [TCPStore("127.0.0.1", port, None, False, wait, wait_for_workers=False) for _ in range(ranks)]
        peers = [1 << step for step in range(math.ceil(math.log2(ranks)))]
        requests = 0
        for rank, client in enumerate(clients):
            for group in "ab":
                client.set(f"{group}/{rank}", bytes(154))
        for rank, client in enumerate(clients):
            for group in "ab":
                for step in peers:
                    client.wait([f"{group}/{(rank + step) % ranks}"])
                    client.get(f"{group}/{(rank + step) % ranks}")
                requests += 1 + 2 * len(peers)
        server.stdin.close()
        return {"requests": requests, "cpu": float(server.stdout.readline())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,512")
    raise_file_limit()
    numbers = [int(text) for text in parser.parse_args().ranks.split(",")]
    found = {ranks: (ranks_meet(ranks), torch_meets(ranks)) for ranks in numbers}
    lines = [
        "# Where trainer ranks meet, next to torch's TCPStore",
        "",
        "`python bench/stores.py`: the same requests of the same ranks; CPU seconds of the server.",
        "",
        "| ranks | requests | CPU s, ours | CPU s, torch's | ratio |",
        "|---|---|---|---|---|",
    ]
    for ranks, (ours, theirs) in found.items():
        assert ours["requests"] == theirs["requests"], (ours, theirs)
        lines.append(
            f"| {ranks:,} | {ours['requests']:,} | {ours['cpu']:.2f} | {theirs['cpu']:.2f} "
            f"| {ours['cpu'] / theirs['cpu']:.1f} |"
        )
    (REPO / "bench" / "results" / "stores.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    print(json.dumps(found))
    most = found[max(found)]
    return 0 if most[0]["cpu"] < min(60.0, 10 * most[1]["cpu"]) else 1


if __name__ == "__main__":
    sys.exit(main())
