"""The options, a file a section; `config/options.py` joins them."""
