"""Estimate the cost of a calibration from a config, before anything is downloaded or rented."""
