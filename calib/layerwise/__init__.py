"""Calibrating a model larger than memory: its weights pass through one decoder layer at a time."""
