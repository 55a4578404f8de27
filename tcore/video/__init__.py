"""Labels through anybody's video."""
