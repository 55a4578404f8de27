"""From videos to a batch."""
