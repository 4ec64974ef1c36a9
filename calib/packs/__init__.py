"""Packs: a calibration in kilobytes, without weights, in a directory or on the Hub."""
