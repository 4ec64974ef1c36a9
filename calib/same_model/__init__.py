"""Marks of a checkpoint: few figures that tell whether another one computes the same K and V."""
