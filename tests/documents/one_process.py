"""Many commands in one fresh interpreter, which imports of hpcrl what the commands do: `python one_process.py` with
JSON on stdin.

(arguments, file for stdout or "") of each command come in and (exit status, what was printed) goes out.  A traceback
counts as status 1, as in a shell.
"""

import contextlib
import io
import json
import sys
import traceback
from pathlib import Path


def main() -> None:
    from hpcrl.cli.main import main as hpcrl

    answers = []
    for arguments, into in json.load(sys.stdin):
        said, out = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            try:
                status = hpcrl(arguments)
            except SystemExit as end:
                status = int(end.code or 0)
            except Exception:  # noqa: BLE001  a traceback is what a user would see
                status = 1
                traceback.print_exc()
        if into:
            Path(into).write_text(out.getvalue())
        answers.append((status, out.getvalue() + said.getvalue()))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
