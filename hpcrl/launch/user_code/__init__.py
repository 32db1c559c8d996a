"""The user's own code in a run: which directories are copied, and which of their files (`directories.py`), the copies
in the run directory (`snapshot.py`), and the commit that is checked out around a recipe (`commit.py`)."""
