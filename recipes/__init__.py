"""Bundled recipes, YAML as package data; `fp8kv recipes` lists them."""
