"""Notes which files of hpcrl a process enters between two calls: on the PYTHONPATH of a run, with HPCRL_WALK=FOLDER.

A walk begins as a function of BEGINS is called and ends as one of ENDS is; FOLDER/PID.N.json holds the N-th: the files in
the order of their first call, and how often the way changed from one to another.  Only the thread that runs the module is
looked at.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

#: (end of the file's name, function): the prompt is taken; the trainer has its share
BEGINS = {("rollout/prompts/prompt_source.py", "next_groups"), ("transport/client.py", "fetch")}
#: the share is in the queue's hands; the gradient is there
ENDS = {("transport/server.py", "put"), ("trainer/reference_and_critic.py", "trained")}


class Walk:
    """The profile function of one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.walks = 0
        self.files: dict[str, int] = {}
        self.changes = 0
        self.last = ""
        self.on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or "/hpcrl/" not in name:
            return
        file = name.rpartition("/hpcrl/")[2]
        place = file, frame.f_code.co_name
        if place in BEGINS and not self.on:
            self.on, self.files, self.changes, self.last = True, {}, 0, ""
        if not self.on:
            return
        self.files[file] = self.files.get(file, 0) + 1
        self.changes += file != self.last
        self.last = file
        if place in ENDS:
            self.on = False
            text = json.dumps({"files": self.files, "changes": self.changes})
            (self.folder / f"{os.getpid()}.{self.walks}.json").write_text(text)
            self.walks += 1


if folder := os.environ.get("HPCRL_WALK"):
    sys.setprofile(Walk(Path(folder)))
