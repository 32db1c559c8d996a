"""How prompt files and held-out sets are named in options, and what that means."""
