"""Names and files of adapters."""
