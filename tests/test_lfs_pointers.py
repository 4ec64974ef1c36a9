"""A Git LFS pointer in place of any file that we read is named as one."""

import re

import pytest
from command_line import SMALL, calibrate, fp8kv, one_line_error

from calib.errors import InputError
from calib.files.names import SCALES_SHARD, STATS_FILE
from calib.scales.stats_file import load_stats

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"
ADVICE = "is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "model.safetensors.index.json"]
)
def test_in_place_of_a_file_of_the_model(name, tiny_directory, tmp_path):
    (tiny_directory / name).write_text(POINTER)
    flags = ("--dataset", "builtin:python-docs", "--samples", 4, "--seq-len", 32)
    done = fp8kv("calibrate", tiny_directory, "-o", tmp_path / "out", *flags)
    one_line_error(done, f"'{tiny_directory / name}' {ADVICE}")


def test_in_place_of_text(tiny_directory, tmp_path):
    for kind in (".jsonl", ".json", ".parquet", ".txt"):
        file = tmp_path / f"text{kind}"
        file.write_text(POINTER)
        done = fp8kv("calibrate", tiny_directory, *SMALL, "--dataset", file, "-o", tmp_path / "out")
        one_line_error(done, f"'{file}' {ADVICE}")


def test_in_place_of_files_of_a_calibration_but_not_of_files_that_are_not_read(tiny_directory, tmp_path):
    # many repositories hold the same weights in forms that their readers do not pull
    for name in ("pytorch_model.bin", "tokenizer.model"):
        (tiny_directory / name).write_text(POINTER)
    out = tmp_path / "out"
    assert calibrate(tiny_directory, "-o", out).exit_code == 0
    statistics, scales = (out / name for name in (STATS_FILE, SCALES_SHARD))
    statistics.write_text(POINTER)
    with pytest.raises(InputError, match=re.escape(f"'{statistics}' {ADVICE}")):
        load_stats(out)
    scales.write_text(POINTER)
    one_line_error(fp8kv("verify", out, "--engine", "vllm"), f"'{scales}' {ADVICE}")
