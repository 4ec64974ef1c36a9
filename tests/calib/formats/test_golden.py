"""Golden files: exactly which names, shapes, dtypes, values and config each engine is given."""

import json
from pathlib import Path

import pytest
from engine_fixtures import describe, make_scales

from calib.formats import FORMATS, export
from calib.formats.directory import write_checkpoint, write_documents

CASES = [
    (name, strategy, targets)
    for name, target in FORMATS.items()
    for strategy in target.strategies
    for targets in (("kv", "qkv") if target.reads_q else ("kv",))
    if name != "fp8kv"  # statistics and recipe only: nothing engine-specific to pin
]


@pytest.mark.parametrize(("name", "strategy", "targets"), CASES)
def test_output_matches_its_golden_file(name, strategy, targets, checkpoint, tmp_path, request):
    made = export(make_scales(strategy, q=targets == "qkv"), checkpoint, name, tp_size=2)
    out = tmp_path / "out"
    out.mkdir()
    if FORMATS[name].with_weights:
        write_checkpoint(made, checkpoint, out, weights="link", readme="")
    else:
        write_documents(made, out)
    golden = Path(__file__).parent / "golden" / f"{name}-{strategy}-{targets}.json"
    found = describe(out)
    if request.config.getoption("--update-golden"):
        golden.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(golden.read_text())


def test_every_golden_file_has_a_case():
    held = {path.stem for path in (Path(__file__).parent / "golden").glob("*.json")}
    assert held == {"-".join(case) for case in CASES}
