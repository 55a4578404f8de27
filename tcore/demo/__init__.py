"""A page in the browser: paint, propagate, look, correct."""
