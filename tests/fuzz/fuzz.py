"""Coverage-guided fuzzing of everything that reads files of others.

fuzz.py                    every target, five million inputs in all
fuzz.py TARGET [-runs=N]   one of them, with libFuzzer's flags

A target fails on any exception but the one that users see as one line, and on any input that takes
longer than libFuzzer's -timeout.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["calib"]):
    from calib.errors import Fp8kvError
    from calib.recipe import load_recipe
    from calib.scalefiles.folder import open_scales, read_scales_json
    from calib.scalefiles.header import read_header, read_values
    from calib.scalefiles.json import parse_object
    from calib.scalefiles.names import parse_scale_name
    from calib.scalefiles.reading import read_scales
    from calib.verify.result import Place
    from calib.verify.rules import choose_rules
    from calib.verify.simulate import simulate

SCRATCH = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
ENGINES = choose_rules(None, None)
PLACES = (Place(), Place(2, fnuz=True))


def header(data: bytes) -> None:
    """A safetensors file, length and all."""
    path = SCRATCH / "x.safetensors"
    path.write_bytes(data)
    for entry in read_header(path).values():
        read_values(path, entry)


def header_text(data: bytes) -> None:
    """The JSON of a header, with a length that is right and eight bytes of data."""
    header(len(data).to_bytes(8, "little") + data + bytes(8))


def json(data: bytes) -> None:
    """Any JSON file."""
    parse_object(data, "it")


def names(data: bytes) -> None:
    """Names of tensors."""
    parse_scale_name(data.decode(errors="replace"))


def scales_json(data: bytes) -> None:
    """kv_cache_scales.json."""
    path = SCRATCH / "kv_cache_scales.json"
    path.write_bytes(data)
    read_scales_json(path)


def directory(data: bytes) -> None:
    """A config and scales, through inspection and every engine's rules."""
    model = SCRATCH / "model"
    model.mkdir(exist_ok=True)
    config, _, rest = data.partition(b"\n\n")
    (model / "config.json").write_bytes(config)
    text = rest[:-8]
    file = len(text).to_bytes(8, "little") + text + rest[-8:]
    (model / "model.safetensors").write_bytes(file)
    read_scales(model).to_json()
    found = open_scales(model)
    for rules in ENGINES:
        for place in PLACES:
            simulate(found, rules, place)


def recipe(data: bytes) -> None:
    """A recipe in YAML."""
    path = SCRATCH / "recipe.yaml"
    path.write_bytes(data)
    load_recipe(str(path))


ENTRY = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
SCALES = b'{"model.layers.0.self_attn.k_scale":%s,"__metadata__":{"format":"pt"}}' % ENTRY
FACTORS = (
    b'{"model_type":"llama","kv_cache":{"dtype":"float8_e4m3fn","scaling_factor":{"0":{"0":0.5}}}}'
)
CONFIG = (
    b'{"num_hidden_layers":1,"num_attention_heads":4,"num_key_value_heads":2,"quantization_config":'
    b'{"quant_method":"compressed-tensors","config_groups":{},"kv_cache_scheme":{"num_bits":8,'
    b'"type":"float","strategy":"attn_head","symmetric":true}}}'
)
WEIGHT = (
    b'"model.layers.0.self_attn.k_proj.weight":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}'
)
# what mutation starts from: random bytes alone would never be JSON
SEEDS = {
    "header": [len(SCALES).to_bytes(8, "little") + SCALES + bytes(4)],
    "header_text": [
        b"{" + WEIGHT.replace(b"4,8", b"0,4") + b"," + SCALES[1:].replace(b"0,4", b"4,8")
    ],
    "json": [SCALES, FACTORS, CONFIG],
    "names": [b"model.layers.0.self_attn.k_scale", b"h.1.attn.v_proj.output_scale"],
    "scales_json": [FACTORS],
    "directory": [CONFIG + b"\n\n" + SCALES[:-1] + b"," + WEIGHT + b"}" + bytes(8)],
    "recipe": [b"strategy: attn_head\ndata: {samples: 4, seq_len: 8}\nobserver: {name: mse}\n"],
}
# target -> inputs
RUNS = {
    header: 1_500_000,
    header_text: 1_000_000,
    json: 1_000_000,
    names: 850_000,
    scales_json: 500_000,
    directory: 100_000,
    recipe: 50_000,
}


def main() -> None:
    """Run all targets, or one."""
    if len(sys.argv) > 1:
        run_one(sys.argv.pop(1))
        return
    for target, runs in RUNS.items():
        command = [sys.executable, __file__, target.__name__, f"-runs={runs}", "-timeout=5"]
        print(f"{target.__name__}: {runs:,} inputs", flush=True)
        subprocess.run([*command, "-verbosity=0", "-rss_limit_mb=1024"], check=True)
    print(f"{sum(RUNS.values()):,} inputs, no crash, no hang")


def run_one(name: str) -> None:
    """Run one target; the other arguments are libFuzzer's."""
    chosen = {target.__name__: target for target in RUNS}[name]
    corpus = SCRATCH / "corpus"
    corpus.mkdir()
    for i, seed in enumerate(SEEDS[name]):
        (corpus / str(i)).write_bytes(seed)
    sys.argv += [str(corpus), f"-dict={Path(__file__).with_name('words.dict')}"]

    def once(data: bytes) -> None:
        try:
            chosen(data)
        except Fp8kvError as error:
            if len(str(error)) > 2000 or "\n" in str(error):
                raise ValueError("what a user sees is not one line") from error

    atheris.Setup(sys.argv, once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
