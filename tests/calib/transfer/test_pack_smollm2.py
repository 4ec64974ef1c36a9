"""A pack of a real model: small, and its scales are those of the calibration, to the bit."""

from apply_cases import scales
from big_weights import quantised
from command_line import fp8kv

DATA = ("--dataset", "builtin:python-docs", "--samples", "4", "--seq-len", "256", "--device", "cpu")


def test_calibrate_pack_apply(smollm2_directory, tmp_path):
    measured, pack = tmp_path / "measured", tmp_path / "pack"
    quantised_model = quantised(smollm2_directory, tmp_path / "fp8", "fp8")
    flags = ("--weights", "none", *DATA)
    for command in (
        ("calibrate", "builtin:smollm2", "-o", measured, *flags),
        ("pack", measured, "-o", pack),
        ("apply", pack, "builtin:smollm2", "-o", tmp_path / "same"),
        ("apply", pack, quantised_model, "-o", tmp_path / "quantised"),
    ):
        done = fp8kv(*command)
        assert done.exit_code == 0, done.stderr
    assert scales(tmp_path / "same") == scales(tmp_path / "quantised") == scales(measured)
    weights = (smollm2_directory / "model.safetensors").stat().st_size
    assert sum(file.stat().st_size for file in pack.iterdir()) < weights / 50
