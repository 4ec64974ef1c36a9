"""Coverage-guided fuzzing of all that reads files of others: `fuzz.py`, or `fuzz.py TARGET [-runs=N]`.

A target fails on any exception but the one that users see as one line, and on any input that takes too long.
"""

import subprocess
import sys
import tempfile
from json import dumps
from math import prod
from pathlib import Path

import atheris
import torch

with atheris.instrument_imports(include=["calib"]):
    from calib.engines.catalogue import choose_engines
    from calib.engines.outcome import Place
    from calib.engines.simulate_loading import simulate
    from calib.errors import Fp8kvError
    from calib.files.model_directory import open_model_directory
    from calib.files.safetensors_header import Entry, read_header, read_values
    from calib.files.scale_files import read_scales_json
    from calib.files.stored_scales import read_scales
    from calib.files.strict_json import parse_object
    from calib.files.tensors import DTYPES
    from calib.models.quantized import WEIGHT_FORMATS
    from calib.models.quantized.coded_weight import ModuleTensors
    from calib.models.quantized.config import QuantizationConfig, name_subject
    from calib.recipe import load_recipe

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from coded_forms import FORMS

SCRATCH = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
ENGINES = choose_engines(None, None)


def written(name, data):
    (SCRATCH / name).write_bytes(data)
    return SCRATCH / name


def header(data):
    path = written("x.safetensors", data)
    for entry in read_header(path).values():
        read_values(path, entry)


def header_text(data):
    """The JSON of a header, with a length that is right and eight bytes of data."""
    header(len(data).to_bytes(8, "little") + data + bytes(8))


def scales_json(data):
    read_scales_json(written("kv_cache_scales.json", data))


def directory(data):
    """A config and scales, through inspection and every engine's rules."""
    model = SCRATCH / "model"
    model.mkdir(exist_ok=True)
    config, _, rest = data.partition(b"\n\n")
    written("model/config.json", config)
    written("model/model.safetensors", len(rest[:-8]).to_bytes(8, "little") + rest)
    read_scales(model).to_json()
    found = open_model_directory(model, weights=False)
    for rules in ENGINES:
        simulate(found, rules, Place())
        simulate(found, rules, Place(2, fnuz=True))


def recipe(data):
    load_recipe(str(written("recipe.yaml", data)))


def quantized_weights(data):
    """A quantization_config, and the types and shapes of a module's tensors, filled with bytes."""
    config, _, rest = data.partition(b"\n\n")
    says, shapes = parse_object(config, "it"), parse_object(rest, "them")
    read = WEIGHT_FORMATS.get(str(says.get("quant_method")))
    entries = {part: entry for part, text in shapes.items() if (entry := _entry(text))}
    if read is None:
        return
    with name_subject("a model"):
        for weight in read(QuantizationConfig(says)).weights(ModuleTensors("m", entries)):
            if prod(weight.shape) <= 1 << 16:
                parts = {part: name.partition(".")[2] for part, name in weight.parts.items()}
                tensors = {part: _filled(entries[name], data) for part, name in parts.items()}
                weight.decode(tensors, torch.empty(weight.shape))


def _entry(text):
    """`F32 4 8` is a matrix; nothing larger than 64 KiB."""
    dtype, *sizes = str(text).split() or [""]
    if dtype not in DTYPES or not all(size.isascii() and size.isdecimal() for size in sizes):
        return None
    shape = tuple(int(size[:6]) for size in sizes)
    return Entry(dtype, shape, 0, 0) if prod(shape) <= 1 << 13 else None


def _filled(entry, data):
    dtype, size = DTYPES[entry.dtype], entry.size * DTYPES[entry.dtype].itemsize
    if dtype == torch.bool or not size:
        return torch.zeros(entry.shape, dtype=dtype)
    return torch.frombuffer(bytearray((data * (size // len(data) + 1))[:size]), dtype=dtype).view(entry.shape)


ENTRY = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
SCALES = b'{"model.layers.0.self_attn.k_scale":%s,"__metadata__":{"format":"pt"}}' % ENTRY
FACTORS = b'{"model_type":"llama","kv_cache":{"dtype":"float8_e4m3fn","scaling_factor":{"0":{"0":0.5}}}}'
CONFIG = (
    b'{"num_hidden_layers":1,"num_attention_heads":4,"num_key_value_heads":2,"quantization_config":'
    b'{"quant_method":"compressed-tensors","config_groups":{},"kv_cache_scheme":{"num_bits":8,'
    b'"type":"float","strategy":"attn_head","symmetric":true}}}'
)
WEIGHT = b'"model.layers.0.self_attn.k_proj.weight":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}'


def _coded_modules():
    """Configs, and types and shapes of a module's tensors, of each form of quantised weights."""
    types = {dtype: name for name, dtype in DTYPES.items()}
    found = [({"quant_method": "mxfp4"}, {"down_proj_blocks": "U8 2 4 1 16", "down_proj_scales": "U8 2 4 1"})]
    for form in FORMS.values():
        tensors, _ = form.make("m", torch.randn(32, 32), **form.options)
        parts = {name.partition(".")[2]: x for name, x in tensors.items()}
        shapes = {part: " ".join([types[x.dtype], *map(str, x.shape)]) for part, x in parts.items()}
        found.append(({"quant_method": "modelopt", **form.says.get("quantization", form.says)}, shapes))
        if form.says.get("quant_method") == "gptq":
            found.append((form.says | {"quant_method": "auto-round", "packing_format": "auto_round"}, shapes))
    return [f"{dumps(says)}\n\n{dumps(shapes)}".encode() for says, shapes in found]


# what mutation starts from: random bytes alone would never be JSON
SEEDS = {
    "header": [len(SCALES).to_bytes(8, "little") + SCALES + bytes(4)],
    "header_text": [b"{" + WEIGHT.replace(b"4,8", b"0,4") + b"," + SCALES[1:].replace(b"0,4", b"4,8")],
    "scales_json": [FACTORS],
    "directory": [CONFIG + b"\n\n" + SCALES[:-1] + b"," + WEIGHT + b"}" + bytes(8)],
    "quantized_weights": _coded_modules(),
    "recipe": [b"strategy: attn_head\ndata: {samples: 4, seq_len: 8}\nobserver: {name: mse}\n"],
}
# target -> inputs
RUNS = {header: 2_000_000, header_text: 1_850_000, scales_json: 1_000_000, quantized_weights: 1_000_000}
RUNS |= {directory: 100_000, recipe: 50_000}


def main():
    if len(sys.argv) > 1:
        run_one(sys.argv.pop(1))
        return
    for target, runs in RUNS.items():
        command = [sys.executable, __file__, target.__name__, f"-runs={runs}", "-timeout=5"]
        print(f"{target.__name__}: {runs:,} inputs", flush=True)
        subprocess.run([*command, "-verbosity=0", "-rss_limit_mb=1024"], check=True)
    print(f"{sum(RUNS.values()):,} inputs, no crash, no hang")


def run_one(name):
    chosen = {target.__name__: target for target in RUNS}[name]
    (SCRATCH / "corpus").mkdir()
    for i, seed in enumerate(SEEDS[name]):
        written(f"corpus/{i}", seed)
    sys.argv += [str(SCRATCH / "corpus"), f"-dict={Path(__file__).with_name('words.dict')}"]

    def once(data):
        try:
            chosen(data)
        except Fp8kvError as error:
            if len(str(error)) > 2000 or "\n" in str(error):
                raise ValueError("what a user sees is not one line") from error

    atheris.Setup(sys.argv, once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
