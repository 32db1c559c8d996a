"""One vLLM server over one host or several: started, watched and ended; and the receiving end of weight updates inside
its workers.

Start with `main.py`, the supervisor, then `server.py`, the process that it starts; `weight_receiver.py` runs in vLLM's
workers, with `pieces/` for what the trainer sends and `loading/` for files.
"""
