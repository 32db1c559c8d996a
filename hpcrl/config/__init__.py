"""Options: declared once each (`sections/`), checked together (`rules/`), read from recipes and flags (`recipe.py`,
`flags.py`), and passed through to Megatron-core and vLLM (`passthrough.py`).

Open `options.py` first: it joins the sections and derives what follows from them.
"""
