"""Packs, as tests make and read them."""

import json

from command_line import fp8kv


def packed(given, path, *flags):
    done = fp8kv("pack", given, "-o", path, *flags)
    assert done.exit_code == 0, done.stderr
    return path


def report_of(directory):
    return json.loads((directory / "fp8kv_calibration.json").read_text())


def manifest(pack):
    return json.loads((pack / "fp8kv_pack.json").read_text())
