"""Engines apart from the plan: restarted on their host (`restarter.py`), added to a running run (`add.py`, `join.py`),
or started by no run (`standalone.py`)."""
