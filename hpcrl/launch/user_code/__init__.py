"""The user's own code in a run: which directories are copied, which of their files, and of which commit
(`directories.py`), and the copies in the run directory (`snapshot.py`)."""
