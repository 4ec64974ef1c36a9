"""Calibrating a model larger than memory: its weights pass through one decoder layer at a time.

The model's own forward stays in charge of masks, positions and each layer's arguments: `replay`.
"""
