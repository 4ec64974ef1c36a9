"""Output directories: exactly which files, names, shapes, dtypes, values and config each engine is given."""

import json
import os
from pathlib import Path

import pytest
import torch
from engine_fixtures import describe, make_scales
from safetensors import safe_open
from safetensors.torch import save_file

from calib.errors import InputError
from calib.files.atomic import atomic_directory
from calib.files.model_directory import open_model_directory
from calib.files.names import CALIBRATION_FILE, SCALES_SHARD
from calib.formats import FORMATS, export
from calib.formats.directory import check_output, write_checkpoint, write_documents

GOLDEN = Path(__file__).parent / "golden"
CASES = [
    (name, strategy, targets)
    for name, target in FORMATS.items()
    for strategy in target.strategies
    for targets in (("kv", "qkv") if target.reads_q else ("kv",))
    if name != "fp8kv"  # statistics and recipe only: nothing engine-specific to pin
]
OLD, RENAMED = "model.layers.0.self_attn", "model-00001-of-00001.safetensors"


def write(checkpoint, out, weights="link"):
    with atomic_directory(out, overwrite=True) as scratch:
        made = export(make_scales(), checkpoint, "vllm")
        write_checkpoint(made, checkpoint, scratch, weights=weights, readme="# Ours\n")
    return out


def tensors(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def index_of(directory):
    return json.loads((directory / "model.safetensors.index.json").read_text())


def snapshot(directory):
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [(path, path.stat().st_mtime_ns, path.read_bytes()) for path in files]


def test_an_output_links_weights_and_leaves_the_source_as_it_is(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint({"author": "Gödel"})
    source = checkpoint.path
    (source / "README.md").write_text("---\nlicense: mit\n---\n# The model\n")
    for name in ("templates/tool.jinja", ".cache/x", "pytorch_model.bin", "consolidated.safetensors"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("x")
    before, umask = snapshot(source), os.umask(0o022)
    try:
        out = write(checkpoint, tmp_path / "out")
    finally:
        os.umask(umask)
    assert snapshot(source) == before
    assert (out / RENAMED).samefile(source / "model.safetensors")
    assert '"author": "Gödel"' in (out / "config.json").read_text()
    ours = {RENAMED, SCALES_SHARD, "model.safetensors.index.json"}  # small files travel, other weights do not
    ours |= {"fp8kv_source/README.md", "fp8kv_source/config.json"}
    theirs = {"README.md", "config.json", "templates/tool.jinja", "tokenizer.json"}
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == ours | theirs
    # a server running as another user can read the scales, and transformers wants "pt"
    assert (out / SCALES_SHARD).stat().st_mode & 0o777 == 0o644
    assert tensors(out / SCALES_SHARD)[1] == {"format": "pt"}
    card = (out / "README.md").read_text()  # the model's card keeps its front matter first and its text last
    assert card.startswith("---\nlicense: mit\n---\n\n# Ours\n\nBeside engines: ")
    assert card.endswith("installed.\n\n# The model\n")


def test_the_shards_of_a_sharded_source_keep_their_names(make_checkpoint, tmp_path):
    source = make_checkpoint().path
    (source / "model.safetensors").rename(source / "part.safetensors")
    names = [f"model.layers.{i}.self_attn.k_proj.weight" for i in range(2)]
    index = {"weight_map": dict.fromkeys(names, "part.safetensors"), "metadata": {"total_size": 32}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    out = write(open_model_directory(source), tmp_path / "out")
    assert (out / "part.safetensors").samefile(source / "part.safetensors")
    written = index_of(out)
    assert set(written["weight_map"].values()) == {"part.safetensors", SCALES_SHARD}
    assert written["metadata"]["total_size"] == 32 + 4 * 4


def test_weights_are_copied_or_left_out_as_asked(checkpoint, tmp_path):
    source = checkpoint.path / "model.safetensors"
    copied = write(checkpoint, tmp_path / "copy", weights="copy") / RENAMED
    assert not copied.samefile(source)
    assert copied.read_bytes() == source.read_bytes()
    out = write(checkpoint, tmp_path / "none", weights="none")
    assert [path.name for path in out.glob("*.safetensors")] == [SCALES_SHARD]
    assert set(index_of(out)["weight_map"].values()) == {"model.safetensors", SCALES_SHARD}


def test_scales_of_an_earlier_calibration_are_replaced(make_checkpoint, tmp_path):
    stale = {f"{OLD}.k_scale": torch.ones(1), f"{OLD}.k_proj.output_scale": torch.ones(1)}
    checkpoint = make_checkpoint(extra=stale | {f"{OLD}.k_proj.weight_scale": torch.ones(1)})
    file = checkpoint.path / "model.safetensors"
    source, _ = tensors(file)
    save_file(source, file, metadata={"format": "pt"})
    checkpoint, before = open_model_directory(checkpoint.path), snapshot(checkpoint.path)
    out = write(checkpoint, tmp_path / "out")
    kept, metadata = tensors(out / RENAMED)
    assert kept.keys() == source.keys() - stale.keys()
    assert all(torch.equal(tensor, source[name]) for name, tensor in kept.items())
    assert metadata == {"format": "pt"}
    index = index_of(out)["weight_map"]
    assert index[f"{OLD}.k_scale"] == SCALES_SHARD
    assert f"{OLD}.k_proj.output_scale" not in index
    assert snapshot(checkpoint.path) == before


def test_where_an_output_may_go(checkpoint, tmp_path):
    out, source = tmp_path / "out", checkpoint.path

    def refused(place, overwrite, message):
        with pytest.raises(InputError, match=message):
            check_output(place, source, overwrite=overwrite)

    check_output(out, source, overwrite=False)
    out.mkdir()
    check_output(out, source, overwrite=False)
    (out / "thesis.txt").write_text("x")
    refused(out, False, "exists; add --overwrite")
    refused(out, True, "was not written by fp8kv")
    (out / CALIBRATION_FILE).write_text("{}")
    check_output(out, source, overwrite=True)
    for near in (source, source / "sub", tmp_path):
        refused(near, True, "would mix with the model")
    refused(tmp_path / ("x" * 300), False, "File name too long; choose another -o")


@pytest.mark.parametrize(("name", "strategy", "targets"), CASES)
def test_output_matches_its_golden_file(name, strategy, targets, checkpoint, tmp_path, request):
    made = export(make_scales(strategy, q=targets == "qkv"), checkpoint, name, tp_size=2)
    out = tmp_path / "out"
    out.mkdir()
    if FORMATS[name].with_weights:
        write_checkpoint(made, checkpoint, out, weights="link", readme="")
    else:
        write_documents(made, out)
    golden, found = GOLDEN / f"{name}-{strategy}-{targets}.json", describe(out)
    if request.config.getoption("--update-golden"):
        golden.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(golden.read_text())
