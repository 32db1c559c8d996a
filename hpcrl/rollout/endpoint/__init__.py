"""The endpoint of the rollout process, as OpenAI's and Anthropic's servers have it: agents ask here, and what they are
answered becomes samples.

Open `server.py` first; `turns.py` is what the protocols (`openai.py`, `anthropic.py`) share, `tool_calls/__init__.py`
says what a form of tool calls is.
"""
