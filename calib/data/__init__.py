"""The token ids that the model reads during calibration, in batches. Knows no scales."""

from calib.data.batches import Batch, make_batches, resolve_batch_size, shared_batch_size
from calib.data.loading import CalibrationData, check_dataset, dataset_key, load_data

__all__ = [
    "Batch",
    "CalibrationData",
    "check_dataset",
    "dataset_key",
    "load_data",
    "make_batches",
    "resolve_batch_size",
    "shared_batch_size",
]
