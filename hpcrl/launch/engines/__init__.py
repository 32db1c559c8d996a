"""Engines apart from the plan: restarted on their host (`restarter.py`), or started by no run (`standalone.py`)."""
