"""Packs, as tests make and read them."""

import json

from apply_cases import ran

FILES = {
    *("README.md", "fp8kv_calibration.json", "fp8kv_pack.json", "fp8kv_stats.safetensors"),
    "kv_cache_scales.json",
}


def packed(given, path, *flags):
    ran("pack", given, "-o", path, *flags)
    return path


def report_of(directory):
    return json.loads((directory / "fp8kv_calibration.json").read_text())


def manifest(pack):
    return json.loads((pack / "fp8kv_pack.json").read_text())
