"""The method: networks, losses and the three branches."""
