"""Models: found by name, opened and checked, loaded."""
