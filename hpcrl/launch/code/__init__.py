"""The user's own modules: which a run needs (`own_modules.py`), and their copies in the run directory
(`snapshot.py`)."""
