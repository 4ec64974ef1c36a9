"""What a calibration takes, worked out from a config, before anything is downloaded or rented."""
