"""What the features are worth."""
