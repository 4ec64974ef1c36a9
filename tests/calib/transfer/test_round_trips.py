"""Any scales, through any chain of formats, stay what they are (a property test)."""

import tempfile
from pathlib import Path

import torch
from apply_cases import config_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from calib.files.stored_scales import read_scales
from calib.transfer.convert import convert

# those that hold a scale per layer, and of these those that hold one per head
SCALAR, PER_HEAD = ("vllm", "aphrodite", "sglang", "tgi", "modelopt", "trtllm"), ("vllm", "aphrodite")
NAMES = (
    "{module}.{x}_scale",
    "{module}.attn.{x}_scale",
    "{module}.{x}_proj.{x}_scale",
    "{module}.{x}_proj.output_scale",
    "{module}.{x}_cache.scale",
    "{module}.qkv_proj.{x}_scale",
)
# what no reader takes for memory that nobody wrote
SCALE = st.floats(2.0**-20, 2.0**10, width=32).filter(lambda scale: scale != 1)


def write(model, directory, values, names):
    """The tiny model with scales of its own; `values`: K and V of every layer, one or per head."""
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).symlink_to(file.resolve())
    tensors = {
        names.format(module=f"model.layers.{layer}.self_attn", x=x): scales
        for layer, pair in enumerate(values)
        for x, scales in zip("kv", pair, strict=True)
    }
    save_file(tensors, directory / "other.safetensors")
    return [(i, *(x.flatten().double().tolist() for x in pair)) for i, pair in enumerate(values)]


def scales(directory):
    return [(layer.layer, [*layer.k], [*layer.v]) for layer in read_scales(directory).layers]


# no deadline: a machine that is busy would fail it; a fixture of the module may be shared
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_scales_survive_every_chain_of_formats_that_hold_them(model, data):
    config = config_of(model)
    heads = data.draw(st.sampled_from([1, config["num_key_value_heads"]]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    shape = data.draw(st.sampled_from([(heads,), (heads, 1, 1), *([()] if heads == 1 else [])]))
    scale = st.lists(SCALE, min_size=heads, max_size=heads)
    values = [
        [torch.tensor(data.draw(scale)).to(dtype).view(shape) for _ in "kv"]
        for _ in range(config["num_hidden_layers"])
    ]
    names = data.draw(st.sampled_from(NAMES if heads == 1 else NAMES[:1]))
    formats = SCALAR if heads == 1 else PER_HEAD
    chain = data.draw(st.lists(st.sampled_from(formats), min_size=1, max_size=3))
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch, "source")
        expected = write(model, here, values, names)
        for step, to in enumerate(chain):
            convert(here, to, Path(scratch, str(step)))
            here = Path(scratch, str(step))
            assert scales(here) == expected
        # and reduced: the largest of every layer
        convert(here, "tgi", Path(scratch, "reduced"), reduce="max")
        assert scales(Path(scratch, "reduced")) == [(i, [max(k)], [max(v)]) for i, k, v in expected]
