"""The loop around the method."""
