"""What --reduce makes of every strategy in every format: one scale per layer, or a refusal."""

from itertools import product

import pytest
from command_line import calibrate, fp8kv, ran, succeeded
from engine_fixtures import make_scales

from calib.choices import FORMATS
from calib.errors import UnsupportedExportError
from calib.files.stored_scales import read_scales
from calib.formats import export

PER_HEAD = ("vllm", "aphrodite")


def expected(name, strategy, reduce):
    """The strategy of what is written; nothing where it is refused."""
    if name == "fp8kv":  # statistics: the strategy is chosen when they are read
        return None if reduce == "max" and strategy != "tensor" else strategy
    if reduce == "max" or strategy == "tensor":
        return "tensor"
    return strategy if strategy == "attn_head" and name in PER_HEAD else None


def largest(scale):
    return float(scale.max())


def written(scales, checkpoint, name, reduce):
    """The strategy of what is written, every number of which is checked; None: refused."""
    try:
        made = export(scales, checkpoint, name, reduce=reduce)
    except UnsupportedExportError:
        return None
    divisor = 6 if name == "sglang-nvfp4" else 1
    for tensor_name, tensor in made.tensors.items():
        module, _, letters = tensor_name.removesuffix("_scale").rpartition(".")
        layer = scales.layers[module.removesuffix("_proj").removesuffix(".k").removesuffix(".v")]
        assert largest(tensor) == largest(getattr(layer, letters[0]) / divisor), tensor_name
    cache = made.documents.get("kv_cache_scales.json", {}).get("kv_cache", {})
    for ranks in cache.get("scaling_factor", {}).values():
        layers = scales.layers.values()
        assert ranks == {str(layer.layer_idx): largest(layer.k) for layer in layers}
    counts = {tensor.numel() for tensor in made.tensors.values()} or {1 if name == "json" else 0}
    strategy = {1: "tensor", 2: "attn_head", 0: scales.strategy}[counts.pop()]
    assert not counts
    scheme = (made.config or {}).get("quantization_config", {}).get("kv_cache_scheme")
    if isinstance(scheme, dict):
        assert scheme.get("strategy", "tensor") == strategy
    return strategy


def test_every_format_does_with_every_strategy_what_is_asked_or_refuses(checkpoint):
    every = [*product(FORMATS, ("tensor", "attn_head", "channel"), ("none", "max"))]
    seen = {each: written(make_scales(each[1]), checkpoint, each[0], each[2]) for each in every}
    assert seen == {each: expected(*each) for each in every}


def held(directory):
    return [(layer.layer, layer.k, layer.v) for layer in read_scales(directory).layers]


def test_convert_and_calibrate_do_the_same(model, tmp_path):
    """Every format from scales per head, and from scales per layer."""
    for strategy in ("tensor", "attn_head"):
        source = tmp_path / strategy
        assert calibrate(model, "-o", source, "--strategy", strategy).exit_code == 0
        wanted = held(source)
        reduced = [(i, (max(k),), (max(v),)) for i, k, v in wanted]
        for name, reduce in product(FORMATS, ("none", "max")):
            out = tmp_path / f"{strategy}-{name}-{reduce}"
            done = fp8kv("convert", source, "--to", name, "--reduce", reduce, "-o", out)
            kind = expected(name, strategy, reduce) if name != "fp8kv" else None
            assert done.exit_code == (0 if kind else 2), (name, reduce, done.stderr)
            assert out.exists() == bool(kind)
            if kind and name != "json":
                factor = 6 if name == "sglang-nvfp4" else 1
                for (_, *ours), (_, *theirs) in zip(
                    held(out), wanted if kind == strategy else reduced, strict=True
                ):
                    for a, b in zip(ours, theirs, strict=True):
                        # a sixth is rounded
                        rel = 2**-22 if factor == 6 else 0
                        assert [x * factor for x in a] == pytest.approx(b, rel=rel)


def test_the_card_and_the_command_that_serves_it_are_of_what_is_written(model, tmp_path):
    source, reduced, converted = tmp_path / "source", tmp_path / "reduced", tmp_path / "converted"
    calibrate(model, "--strategy", "attn_head", "-o", source)
    assert "--attention-backend" in (source / "README.md").read_text()
    done = succeeded(calibrate(model, "--strategy", "attn_head", "-o", reduced, "--reduce", "max"))
    assert "--attention-backend" not in " ".join(done.stdout.split())
    convert = ("convert", source, "--to", "vllm", "--reduce", "max", "-o", converted)
    assert fp8kv(*convert).exit_code == 0
    for out in (reduced, converted):
        card = (out / "README.md").read_text()
        assert "--attention-backend" not in card
        assert "strategy `tensor`" in card
        assert fp8kv("verify", out, "--engine", "sglang").exit_code == 0
    # apply reduces as the calibration did, unless a strategy is named
    for extra, count in (((), 1), (("--strategy", "attn_head"), 2)):
        out = tmp_path / f"out-{count}"
        done = ran("apply", reduced, model, "-o", out, *extra)
        assert {len(k) for _, k, _ in held(out)} == {count}


def test_query_scales_are_not_left_out_unasked(model, tmp_path):
    source = tmp_path / "source"
    assert calibrate(model, "-o", source, "--targets", "qkv").exit_code == 0
    for name in FORMATS:
        done = fp8kv("convert", source, "--to", name, "-o", tmp_path / name)
        assert done.exit_code == (0 if name in PER_HEAD else 2), name
        if name not in (*PER_HEAD, "fp8kv"):
            assert "--without-q" in done.stderr
