"""What trackers are sent."""
