"""Who watches the launcher."""
