"""Scales that exist already, written elsewhere: converted, stripped, repaired, applied, merged, packed."""
