"""Serving engines: a plugin inside of them, and a client of a running server."""
