"""What users of slime and vime bring: their flags (`flags.toml` owns what becomes of each) and their scripts."""
