"""Studies that ended, outside the package."""
