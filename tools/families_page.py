"""Write docs/models.md by running a small model of every family: `python tools/families_page.py`.

families_page.py [FAMILY ...]   print the rows of these families, or write the whole page
"""

import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from jinja2 import Environment, FileSystemLoader
from prose import fold
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import families
import transformers
from command_line import fp8kv
from fake_quant import fake_quantized
from realistic import give_realistic_weights
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, AutoTokenizer, Cache

from calib.capture.directory_scales import open_scales
from calib.data import load_data
from calib.models.config import auto_class, load_config
from calib.models.load import load_model, load_tokenizer
from calib.models.sources import find_model
from calib.recipe import load_recipe
from calib.scales.scales import KVScales
from calib.scales.stats_file import load_stats
from fp8kv_runtime.hf import fp8_attention
from fp8kv_runtime.hf.layers import Fp8CacheLayer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
COLUMNS = ("calibrate", "layerwise", "eval", "generate", "bake")
RIGHT = "right"
_ARCHITECTURES = ROOT / "tools" / "engine_classes" / "architectures"
_TEXT = ("--dataset", "random", "--seq-len", "40", "--device", "cpu", "--dtype", "float32")
# of float32: some code adds in another order where there is a cache
_ROUNDING = 1e-5
_OTHER_SUMS = 1e-3  # of what rounding K and V changes: sums in another order
_PROMPT = "5817449"
_BAKE_TOKENS = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(1))

# whose settings need no more than to be named
_PLAIN = (
    "beam biogpt bitnet ctrl diffllama doge gpt_neox_japanese inkling2_text jetmoe lfm3 mpt nanochat xglm"
)
_WITHOUT_CACHE = "falcon_mamba mamba recurrent_gemma rwkv"
_MINIMAX_M3 = families.LATENT["deepseek_v32"] | {"index_block_size": 8, "index_topk_blocks": 2}
_MINIMAX_M3 |= {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]}
# the settings of tests/support/families.py; of other families those that engines' classes are built from
TEXT: dict[str, Mapping[str, Any]] = {
    **families.FAMILIES,
    **families.HYBRIDS,
    **families.UNEVEN,
    **families.PARALLEL,
    **families.CONVOLVED,
    **families.OWN_CACHE,
    **families.ONE_MODULE,
    **families.LATENT,
    "gemma3n_text": families.SHARED_KV,
    "minimax_m3_vl_text": _MINIMAX_M3,
    **{name: {} for name in f"{_PLAIN} {_WITHOUT_CACHE}".split()},
}
# Gemma 4 E2B and E4B, whose last layers read the cache of others
_SHARED_GEMMA4 = _ARCHITECTURES / "Gemma4ForCausalLM-shared.json"
# sections of positions in three dimensions, which vLLM reads elsewhere
_SECTIONS = {name: [8, 12, 12] for name in ("hunyuan_vl", "paddleocr_vl", "qwen2_vl", "qwen2_5_vl")}
_SECTIONS["glm4v_moe"] = [4, 6, 6]
# of these other models are built: a part of a model that has a row, one that writes blocks, pictures alone
_STATEFUL = {"linear attention", "mamba", "conv", "moe", "mlp"}  # layers that calibrate must name
_LEFT_OUT = {"blip-2", "diffusion_gemma", "glm5_next_text", "granite_speech", "step3p5"}


class Refused(Exception):
    """What a command says that cannot run this model."""


@dataclass
class Row:
    """What the commands make of a family."""

    family: str
    class_name: str = ""
    layers: str = ""  # how many attend, and what the others are
    results: dict[str, str] = field(default_factory=dict)  # by column


def known_families() -> dict[str, Callable[[], nn.Module]]:
    """Return a function that builds a small model of each family, by its `model_type`."""
    known = {name: partial(_tiny_model, name, options) for name, options in TEXT.items()}
    for file in sorted(_ARCHITECTURES.glob("*.json")):
        fields = json.loads(file.read_text())
        name = fields["model_type"]
        if name in transformers.CONFIG_MAPPING and name not in _LEFT_OUT:
            known.setdefault(name, partial(_built_model, name, fields))
    known["gemma4_text-shared"] = partial(_built_model, "gemma4_text", json.loads(_SHARED_GEMMA4.read_text()))
    known["mllama"] = partial(families.tiny_vision_language_model, "mllama")  # with cross-attention
    return dict(sorted(known.items()))


def _tiny_model(name: str, options: Mapping[str, Any]) -> nn.Module:
    model: nn.Module = families.tiny_model(name, **options)
    with torch.no_grad():
        for child, parameter in model.named_parameters():
            if child.endswith(".temp"):  # Zaya's K is multiplied by this, which starts at 0
                parameter.fill_(1.0)
    return model


def _built_model(name: str, fields: Mapping[str, Any]) -> nn.Module:
    options = {key: value for key, value in fields.items() if key not in ("fp8kv_attention", "model_type")}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **options)
    config.enable_audio_output = False  # what speaks beside the model that reads
    text = config.get_text_config(decoder=True)
    text.update({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})
    if name == "mistral4":  # whose factor in vLLM is of another size
        text.rope_parameters["partial_rotary_factor"] = 1.0
    if name in _SECTIONS:
        text.rope_parameters["mrope_section"] = _SECTIONS[name]
    sees = "ForConditionalGeneration" in fields["architectures"][0]
    is_causal = type(config) in AutoModelForCausalLM._model_mapping and not sees
    auto = AutoModelForCausalLM if is_causal else AutoModelForMultimodalLM
    model: nn.Module = auto.from_config(config)
    with suppress(NotImplementedError):  # of a model that consists of several
        give_realistic_weights(model)
    return model.eval()


def run_family(family: str, model: nn.Module, home: Path) -> Row:
    """Run every command on `model`, saved under `home`."""
    row, source, scales = Row(family, type(model).__name__), home / "model", home / "calibrate"
    kinds = _layer_types(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values")  # of Llama 4's RoPE, which is not stored
        families.save_model(model.to(torch.bfloat16), source)
    _give_tokenizer(source)
    attending: set[int] = set()

    def calibrate(name: str, *flags: str) -> str:
        command = (
            "calibrate",
            source,
            "-o",
            home / name,
            *_TEXT,
            "--samples",
            16,
            "--format",
            "fp8kv",
            *flags,
        )
        said = " ".join(_run(*command).split())
        caches = plain_caches(source, home / name)
        attending.update(caches)
        left = {str(i): kind for i, kind in enumerate(kinds) if i not in attending and kind in _STATEFUL}
        for kind in left.values():
            indices = ", ".join(i for i in left if left[i] == kind)
            assert f"{kind.replace(' ', '_')} ({indices})" in said, f"{kind} is not named as left alone"
        return compare_amax(home / name, caches)

    commands: dict[str, Callable[[], str]] = {
        "calibrate": lambda: calibrate("calibrate"),
        "layerwise": lambda: calibrate("layerwise", "--offload", "layerwise"),
        "eval": lambda: evaluate(source, attending),
        "generate": lambda: generate(source, scales),
        "bake": lambda: bake(source, scales, home / "baked"),
    }
    for column, command in commands.items():
        try:
            row.results[column] = command()
        except Refused as error:
            row.results[column] = f"refused: {str(error).replace(str(home), 'DIR')}"
            if column == "calibrate":
                return row
        except Exception as error:  # noqa: BLE001 (a command that ends so is wrong)
            row.results[column] = f"wrong: {type(error).__name__}: {str(error)[:200]}"
    others = sorted({kind for i, kind in enumerate(kinds) if i not in attending})
    row.layers = f"{len(attending)} of {max(len(kinds), len(attending))}"
    row.layers += f"; others: {', '.join(others)}" if others else ""
    return row


def _layer_types(model: Any) -> list[str]:
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    return [str(kind).replace("_", " ") for kind in kinds]


def _give_tokenizer(directory: Path) -> None:
    """Write a tokenizer of bytes, which also those classes read that know no words."""
    file = directory / "tokenizer.json"
    special = [token["content"] for token in json.loads(file.read_text())["added_tokens"]]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(ByteLevel.alphabet())[:100]])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(file))


def _run(*arguments: Any) -> str:
    done = fp8kv(*arguments)
    if done.exit_code == 0:
        return str(done.stdout)
    lines = [line for line in done.stderr.splitlines() if line.startswith("fp8kv: ")]
    if len(lines) != 1 or "Traceback" in done.stderr:
        raise done.exception or AssertionError(done.stderr)
    raise Refused(lines[0].removeprefix("fp8kv: "))


@torch.inference_mode()
def plain_caches(source: Path, out: Path) -> dict[int, tuple[Tensor, Tensor]]:
    """Return K and V [H, N, D] of each layer that the whole model caches of the text read for `out`."""
    recipe, checkpoint = load_recipe(str(out / "fp8kv_calibration.json")), find_model(str(source))
    model = load_model(checkpoint, load_config(checkpoint), recipe.dtype, recipe.device)
    samples = load_data(recipe.data, load_tokenizer(checkpoint), lambda: model).samples
    batches = torch.split(torch.tensor(samples), int(recipe.data.batch_size))
    parts = [read_caches(model, batch) for batch in batches]

    def join(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([x.transpose(0, 1).flatten(1, 2) for x in tensors], 1)

    return {i: (join(part[i][0] for part in parts), join(part[i][1] for part in parts)) for i in parts[0]}


@torch.inference_mode()
def read_caches(model: Any, ids: Tensor, mask: Tensor | None = None) -> dict[int, tuple[Tensor, Tensor]]:
    """Return K and V [B, K, T, D] of each layer of the cache that `model` fills with token `ids` [B, T]."""
    caches: dict[int, tuple[Tensor, Tensor]] = {}
    update = Cache.update

    def noting(self: Cache, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        held = update(self, key, value, layer_idx, *args, **kwargs)
        caches[layer_idx] = held[:2]  # all of them, also where the layer keeps a window
        return held

    with patch.object(Cache, "update", noting):
        model(input_ids=ids, attention_mask=mask, use_cache=True)
    return caches


def compare_amax(out: Path, caches: Mapping[int, tuple[Tensor, Tensor]]) -> str:
    """Compare the amax of each head and channel in the statistics with K and V of `caches` [H, N, D]."""
    layers, largest = {layer.layer_idx: layer for layer in load_stats(out).layers.values()}, 0.0
    wrong = [f"layer {i} is cached and not measured" for i in caches.keys() - layers.keys()]
    for i, layer in layers.items():
        for letter, found, held in zip("KV", (layer.k.amax, layer.v.amax), caches[i], strict=True):
            expected = held.abs().amax(1).float()
            copies = len(expected) // len(found)  # some caches hold each head several times
            error = (expected - found.repeat_interleave(copies, 0)).abs().max() / expected.max()
            largest = max(largest, float(error))
            if error > _ROUNDING:
                wrong.append(f"{letter} of layer {i} is not what the cache holds")
    if wrong:
        return f"wrong: {'; '.join(wrong)}"
    return f"{RIGHT} to {largest:.0e}" if largest else RIGHT


def evaluate(source: Path, attending: set[int]) -> str:
    """Evaluate scales per layer; see that every layer that attends was held in FP8."""
    in_fp8: set[int] = set()
    update = Fp8CacheLayer.update

    def noting(self: Fp8CacheLayer, *args: Any, **kwargs: Any) -> Any:
        in_fp8.add(self.scales.layer_idx)
        return update(self, *args, **kwargs)

    with patch.object(Fp8CacheLayer, "update", noting):
        _run("eval", source, *_TEXT, "--samples", 2, "--variants", "tensor")
    return RIGHT if in_fp8 == attending else f"wrong: of {sorted(attending)} {sorted(in_fp8)} were in FP8"


def generate(source: Path, out: Path) -> str:
    """Generate text on an FP8 cache; see that it is that of the whole model with rounded K and V."""
    flags = ("--scales", out, "--device", "cpu", "--dtype", "float32", "--max-new-tokens", 5, "--json")
    found = json.loads(_run("generate", source, _PROMPT, *flags))["fp8"]["token_ids"]
    model = _in_float32(source)
    scales: KVScales = open_scales(out, find_model(str(source)))(model)
    inputs = AutoTokenizer.from_pretrained(source)(_PROMPT, return_tensors="pt")
    ids = inputs["input_ids"]
    with torch.inference_mode():
        plain = model(ids, use_cache=False).logits
        with fake_quantized(model, scales):
            rounded = model(ids, use_cache=False).logits
        with fp8_attention(model, scales):
            error = (model(ids, use_cache=True).logits - rounded).norm() / (plain - rounded).norm()
    if not error < _OTHER_SUMS:
        return f"wrong: logits are off by {error:.2g} of what rounding K and V changes"
    with fake_quantized(model, scales):
        output = model.generate(**inputs, max_new_tokens=5, do_sample=False, use_cache=False)
    expected = output[0, inputs["input_ids"].shape[1] :].tolist()
    return RIGHT if found == expected else f"wrong: {found} was written, not {expected}"


def bake(source: Path, out: Path, baked: Path) -> str:
    """Bake for FP8, without rounding a weight; see that the logits in float32 are the source's."""
    command, facts = ("bake", source, "--scales", out, "--for", "fp8", "-o", baked), baked / "fp8kv_bake.json"
    flags = ""
    try:
        _run(*command)
    except Refused as error:
        if "add --dtype float32" not in str(error):
            raise
    if not facts.exists() or not json.loads(facts.read_text())["exact"]:
        flags = " with `--dtype float32`"
        _run(*command, "--dtype", "float32", "--overwrite")
    with torch.inference_mode():
        before, after = (_in_float32(x)(_BAKE_TOKENS, use_cache=False).logits for x in (source, baked))
    return f"{RIGHT}{flags}" if torch.equal(before, after) else "wrong: logits are others"


def _in_float32(directory: Path) -> Any:
    auto = auto_class(AutoConfig.from_pretrained(directory))
    model = auto.from_pretrained(directory, dtype=torch.float32).eval()
    for parameter in model.parameters():  # kernels add in another order where memory is aligned otherwise
        parameter.data = parameter.data.clone()
    return model


def rows(names: Iterable[str] = ()) -> Iterator[Row]:
    """Run the families `names`, or all."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    known = known_families()
    for name in names or known:
        with tempfile.TemporaryDirectory() as home:
            yield run_family(name, known[name](), Path(home))


def row_cells(row: Row, reasons: dict[str, int]) -> list[str]:
    """Return the cells of a row; why commands refuse the model becomes a number in `reasons`."""
    cells = []
    for column in COLUMNS:
        word, _, reason = row.results.get(column, "").partition(": ")
        reason = _general(reason)
        cells.append(f"{word}, {reasons.setdefault(reason, len(reasons) + 1)}" if reason else word or "-")
    return [f"`{row.family}`", f"`{row.class_name}`", row.layers or "-", *cells]


def _general(reason: str) -> str:
    """Leave out of a sentence the layer, class and sizes that it names, as those of one small model."""
    for pattern, general in (
        (r"\b[\w.]+\.\d+\.[\w.]*\w", "LAYER"),
        (r"\b\w+For(CausalLM|ConditionalGeneration)|\b\w+LMHeadModel", "CLASS"),
        (r" caches \[.+\] but attends to \[.+\]: it| \(\w+Attention\)|\[[\d, ]+\] ", ""),
        (r"'DIR/\w+'", "DIR"),
        (r" \(\d+ more problems?\)", ""),
    ):
        reason = re.sub(pattern, general, reason)
    return reason


def page(table: Iterable[Row]) -> str:
    """Render the whole page."""
    template = Environment(loader=FileSystemLoader(Path(__file__).parent)).get_template("families.md.j2")
    reasons: dict[str, int] = {}
    cells = [row_cells(row, reasons) for row in table]
    version = transformers.__version__.rpartition(".")[0]
    text = template.render(columns=COLUMNS, rows=cells, reasons=reasons, version=version)
    return f"{fold(text.rstrip())}\n"


if __name__ == "__main__":
    if names := sys.argv[1:]:
        for row in rows(names):
            print(row)
    else:
        PAGE.write_text(page(rows()))
