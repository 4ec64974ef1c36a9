"""Every bfloat16 magnitude in range has a bin of its own."""

import torch

from calib.scales.observers import NUM_BINS, bin_values, magnitude_histogram


def test_bins_are_consecutive_bfloat16_magnitudes():
    values = bin_values()
    assert values[0] == 2.0**-24
    assert values[-1] == 2.0**24 - 2.0**16
    assert torch.equal(values.bfloat16().float(), values)
    assert (values.bfloat16().view(torch.int16).diff() == 1).all()


def test_each_value_is_counted_in_the_bin_of_its_magnitude_and_head():
    x = torch.tensor([[[1.0, -1.0, 1.5], [448.0, 0.0, 2.0**-30]]])  # [N=1, H=2, D=3]
    counts = magnitude_histogram(x)
    found = {(h, float(bin_values()[b])): int(counts[h, b]) for h, b in counts.nonzero().tolist()}
    assert found == {(0, 1.0): 2, (0, 1.5): 1, (1, 448.0): 1, (1, 2.0**-24): 2}


def test_other_dtypes_are_rounded_to_bfloat16():
    x = torch.rand(50, 2, 8, generator=torch.Generator().manual_seed(0)) * 100
    assert torch.equal(magnitude_histogram(x), magnitude_histogram(x.bfloat16()))


def test_values_beyond_the_last_bin_land_in_it():
    counts = magnitude_histogram(torch.full((1, 1, 4), 1e30))
    assert counts[0, NUM_BINS - 1] == 4
