"""Tests of the data: python test_data.py, or pytest."""

import json
from pathlib import Path

ROWS = [json.loads(line) for line in (Path(__file__).parent / "train.jsonl").read_text().splitlines()]


def test_every_row_is_whole():
    for row in ROWS:
        assert all(row[key] for key in ("prompt", "response")), row


def test_no_prompt_has_two_answers():
    assert len({row["prompt"] for row in ROWS}) == len(ROWS)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"{name}: good")
