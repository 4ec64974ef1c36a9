"""The token ids and pictures that the model reads during calibration, in batches. Knows no scales."""

from calib.data.batches import Batch, make_batches, resolve_batch_size, shared_batch_size
from calib.data.loading import CalibrationData, check_dataset, dataset_key, load_data
from calib.data.pictures import PictureReader
from calib.data.samples import PictureSample, Piece

__all__ = [
    "Batch",
    "CalibrationData",
    "PictureReader",
    "PictureSample",
    "Piece",
    "check_dataset",
    "dataset_key",
    "load_data",
    "make_batches",
    "resolve_batch_size",
    "shared_batch_size",
]
