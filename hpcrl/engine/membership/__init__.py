"""What rollout process, trainer and engines' own supervisors share about engines: `registry.py`, first, says who they
are and how each is; `http.py` how one is asked, `broadcast.py` how all are.

What only one of them does stays there: the pool, who is asked next and how busy they are (`rollout/engines/`), weight
updates (`weights/`), supervision (`engine/`, `launch/`).  What supervisors write down is in `run/engine_files.py`.
"""
