"""Tests of the data: python test_data.py, or pytest."""

import json
from pathlib import Path

ROWS = [json.loads(line) for line in (Path(__file__).parent / "train.jsonl").read_text().splitlines()]


def test_every_row_is_whole():
    for row in ROWS:
        assert all(row[key] for key in ("prompt", "better", "worse")), row


def test_better_and_worse_differ():
    assert all(row["better"] != row["worse"] for row in ROWS)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"{name}: good")
