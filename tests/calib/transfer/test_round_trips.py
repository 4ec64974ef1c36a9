"""Any scales, through any chain of formats, stay what they are (property tests)."""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from calib.files.stored_scales import read_scales
from calib.transfer.convert import convert

# no deadline: a machine that is busy would fail it; a fixture of the module may be shared
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALAR = ("vllm", "aphrodite", "sglang", "tgi", "modelopt", "trtllm")
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


def write(model, directory, values, names, dtype, shape):
    """The tiny model with scales of its own; `values`: K and V of every layer, one or per head."""
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).symlink_to(file.resolve())
    tensors = {
        names.format(module=f"model.layers.{layer}.self_attn", x=x): torch.tensor(
            np.array(scales), dtype=dtype
        ).view(shape(len(scales)))
        for layer, each in enumerate(values)
        for x, scales in zip("kv", each, strict=True)
    }
    save_file(tensors, directory / "other.safetensors")
    return [(i, *(x.tolist() for x in pair)) for i, pair in enumerate(pairs(values, dtype))]


def pairs(values, dtype):
    return [[torch.tensor(scales, dtype=dtype).double() for scales in each] for each in values]


def scales(directory):
    return [(layer.layer, [*layer.k], [*layer.v]) for layer in read_scales(directory).layers]


def layers_of_model(model):
    return json.loads((model / "config.json").read_text())["num_hidden_layers"]


@given(data=st.data())
@QUICK
def test_one_scale_per_layer_survives_every_chain_of_formats(model, data):
    values = [[[data.draw(SCALE)], [data.draw(SCALE)]] for _ in range(layers_of_model(model))]
    names = data.draw(st.sampled_from(NAMES))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    shape = data.draw(st.sampled_from([lambda n: (n,), lambda n: (), lambda n: (n, 1, 1)]))
    chain = data.draw(st.lists(st.sampled_from(SCALAR), min_size=1, max_size=3))
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch, "source")
        expected = write(model, here, values, names, dtype, shape)
        for step, to in enumerate(chain):
            convert(here, to, Path(scratch, str(step)))
            here = Path(scratch, str(step))
            assert scales(here) == expected


@given(data=st.data())
@QUICK
def test_scales_per_head_survive_the_formats_that_hold_them(model, data):
    heads = json.loads((model / "config.json").read_text())["num_key_value_heads"]
    per_head = st.lists(SCALE, min_size=heads, max_size=heads)
    values = [[data.draw(per_head), data.draw(per_head)] for _ in range(layers_of_model(model))]
    shape = data.draw(st.sampled_from([lambda n: (n,), lambda n: (n, 1, 1)]))
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch, "source")
        expected = write(model, here, values, NAMES[0], torch.float32, shape)
        chain = data.draw(st.lists(st.sampled_from(["vllm", "aphrodite"]), max_size=2))
        for step, to in enumerate(chain):
            convert(here, to, Path(scratch, str(step)))
            here = Path(scratch, str(step))
        assert scales(here) == expected
        # and reduced: the largest of every layer
        convert(here, "tgi", Path(scratch, "reduced"), reduce="max")
        assert scales(Path(scratch, "reduced")) == [(i, [max(k)], [max(v)]) for i, k, v in expected]
