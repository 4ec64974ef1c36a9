"""A twin of a model that needs its scales, proved."""
