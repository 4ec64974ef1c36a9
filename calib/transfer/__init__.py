"""Scales that exist already, written again: converted, stripped, repaired."""
