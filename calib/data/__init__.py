"""The token ids and pictures that the model reads during calibration, in batches. Knows no scales."""

from calib.data.batches import Batch, make_batches, resolve_batch_size, shared_batch_size
from calib.data.loading import MEDIA_COUNTS, CalibrationData, check_dataset, dataset_key, load_data
from calib.data.media import MediaReader
from calib.data.samples import MediaSample, Piece

__all__ = [
    "MEDIA_COUNTS",
    "Batch",
    "CalibrationData",
    "MediaReader",
    "MediaSample",
    "Piece",
    "check_dataset",
    "dataset_key",
    "load_data",
    "make_batches",
    "resolve_batch_size",
    "shared_batch_size",
]
