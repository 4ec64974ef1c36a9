"""What a calibration leaves behind: a checkpoint directory with scales, statistics and a card."""
