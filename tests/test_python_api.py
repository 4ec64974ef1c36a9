"""The Python API as a stranger types it in a notebook: a result, or an InputError of one line."""

import ast
import copy
import inspect
import pickle
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from doc_blocks import PAGES, ROOT
from families import save_model, tiny_model

import calib
import calib.data
import calib.formats
import calib.job
import calib.recipe as calib_recipe
import cli
import fp8kv_runtime.hf
from calib import InputError

DATA = {"data.dataset": "random", "data.samples": 4, "data.seq_len": 32}


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """Names as a notebook has them, of a model and its calibration."""
    folder = tmp_path_factory.mktemp("notebook")
    model, recipe = tiny_model("llama"), calib.load_recipe(None, DATA)
    directory = save_model(model, folder / "tiny-llama")
    result = calib.run(directory, recipe, folder / "out")
    stats, scales = calib.load_stats(result.output), calib.load_scales(result.output)
    rows = torch.randint(3, 128, (4, 24), generator=torch.Generator().manual_seed(1))
    names = {"Path": Path, "calib": calib, "torch": torch, "copy": copy, "pickle": pickle}
    names |= {"on_fp8": fp8kv_runtime.fp8_attention, "folder": str(folder), "model": model, "rows": rows}
    names |= {"directory": directory, "recipe": recipe, "out": result.output}
    return names | {"stats": stats, "scales": scales}


WRONG = {
    'calib.run(model, recipe, "o")': "model must be str or Path, got a LlamaForCausalLM",
    'calib.run(directory, recipe, "")': "a path is empty",
    'calib.run(directory, recipe, "~nobody-of-this-name/o")': "has no home folder",
    'calib.run(directory, "tensor-absmax", "o")': "recipe must be Recipe, got 'tensor-absmax'; "
    "calib.load_recipe makes one",
    'calib.run(directory, calib.Recipe)': "recipe must be Recipe, got the class Recipe",
    'calib.run(directory, recipe, "o", overwrite="no")': "overwrite must be bool, got 'no'",
    'calib.load_recipe(5)': "source must be str, Path or None, got 5",
    'calib.load_recipe(None, {5: 3})': "a key of overrides must be str, got 5",
    'calib.Recipe(stratgy="tensor")': "unknown key 'stratgy' (did you mean 'strategy'?); legal",
    'calib.Recipe(strategy="per_head")': "strategy: Input should be 'tensor', 'attn_head' or "
    "'channel', got 'per_head' (did you mean 'attn_head'?)",
    # a suggestion is of what may have been meant
    'calib.Recipe(device="gpu")': "device: Input should be 'auto', 'cpu' or 'cuda', got 'gpu'$",
    'recipe.model_copy(update={"strategy": "per_head"})': "did you mean 'attn_head'?",
    'setattr(recipe, "strategy", "channel")': "strategy cannot be set, a recipe is frozen",
    'calib.calibrate(model, 5, recipe)': "loader of batches, also for a single one, got 5",
    'calib.calibrate(model, [], recipe)': "there is nothing to calibrate on",
    'calib.calibrate(torch.nn.Linear(2, 2), [rows], recipe)': "must be PreTrainedModel, got a Lin",
    'calib.scales_for(model, [rows], format=None)': "format must be 'vllm', 'aphrodite', ",
    'calib.load_stats(5)': "path must be str or Path, got 5",
    'calib.load_stats("nope")': "'nope' does not exist",
    'calib.load_scales(None)': "directory must be str or Path, got None",
    'calib.load_scales(folder)': "has no fp8kv_stats.safetensors",
    'calib.save_stats(scales, "s")': "stats must be KVStats, got a KVScales; calib.load_stats",
    'calib.save_stats(stats, "no/such/folder/s.safetensors")': "cannot write 'no/such/folder",
    'calib.derive_scales(stats, "attn_head-absmax")': "recipe must be Recipe, got 'attn_head-",
    'stats.scales(strategy="tensor", observer="absmax")': "observer must be Observer, got 'absm",
    'stats.merge("x")': "stats must be KVStats, got 'x'",
    'stats.join(scales)': "later must be KVStats, got a KVScales",
    'calib.LayerScales(0, k=1.0, v=1.0)': "k must be Tensor, got 1.0",
    'calib.LayerScales("0", torch.ones(1), torch.ones(1))': "layer_idx must be int, got '0'",
    'calib.KVScales("per_head", "e4m3fn", scales.layers)': "did you mean 'attn_head'?",
    'calib.KVScales("tensor", "e4m3fn", {"a": 1.0})': "layers['a'] must be LayerScales, got 1.0",
    'calib.KVStats([])': "layers must be Mapping, got a list",
    'on_fp8(model, str(out)).__enter__()': "scales must be as calib.load_scales returns them, got '",
    'on_fp8(str(directory), scales).__enter__()': "model must be a transformers model, got '",
    'on_fp8(model, scales, block_size=0).__enter__()': "a whole number from 1 on, got 0",
    'on_fp8(model, scales, backend="tritn").__enter__()': "one of auto, triton, torch, got 'tritn'",
}  # fmt: skip


@pytest.mark.parametrize("call", WRONG)
def test_a_mistake_is_one_line(call, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((InputError, fp8kv_runtime.AttentionError)) as caught:
        eval(call, dict(typed))
    message = str(caught.value)
    assert WRONG[call] in f"{message}$"
    assert "\n" not in message
    assert len(message) < 500
    assert caught.value.__cause__ is None
    assert [*tmp_path.iterdir()] == []


SAME = [
    ('calib.run(str(directory), recipe, "by-str").tokens',
     'calib.run(Path(directory), recipe, Path("by-path")).tokens'),
    ('calib.Recipe(data={"dataset": "a.txt"})', 'calib.Recipe(data={"dataset": Path("a.txt")})'),
    ('calib.load_recipe("qkv-attn_head")', 'calib.load_recipe(Path("qkv-attn_head"))'),
    ("recipe", "pickle.loads(pickle.dumps(recipe))"),
    ("recipe", "copy.deepcopy(recipe)"),
    ("recipe", "type(recipe).model_validate_json(recipe.model_dump_json())"),
    ('recipe.model_copy(update={"strategy": "channel"}).data.model_fields_set',
     "recipe.data.model_fields_set"),
    ("calib.load_scales(str(out))", "calib.derive_scales(stats, recipe)"),
    ('calib.load_scales(out / "fp8kv_stats.safetensors")', "calib.load_scales(out)"),
    ('calib.save_stats(stats, "s.safetensors") or calib.load_stats("s.safetensors")', "stats"),
    ('calib.save_stats(stats, "~/h.safetensors") or calib.load_stats("h.safetensors")', "stats"),
    ("measured(rows)", "measured(row for row in rows)"),
    ('measured([{"input_ids": rows, "attention_mask": (rows > 40).long()}])',
     "measured([[row[row > 40].tolist() for row in rows]])"),
]  # fmt: skip


def comparable(value):
    if isinstance(value, calib.KVScales):
        tensors = {f"{name} {w}": x for name, lay in value.layers.items() for w, x in lay.items()}
    elif isinstance(value, calib.KVStats):
        tensors = value.tensors() | {"tokens": torch.tensor(value.counts())}
    else:
        return value
    assert tensors
    return {name: tensor.tolist() for name, tensor in tensors.items()}


@pytest.mark.parametrize("ways", SAME, ids=lambda ways: ways[0])
def test_both_ways_to_type_it_are_one(ways, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    names = typed | {"measured": lambda given: calib.calibrate(typed["model"], given, typed["recipe"])}
    one, other = (comparable(eval(call, names)) for call in ways)
    assert one == other


def test_what_is_drawn_while_calibrating_can_be_trained_on_and_warnings_name_the_line(typed):
    def loader():
        assert not torch.is_inference_mode_enabled()
        yield typed["rows"]

    calib.calibrate(typed["model"], loader(), typed["recipe"])
    # a warning names the line that asked
    with pytest.warns(UserWarning, match="tokens were read") as caught:
        calib.scales_for(typed["model"], [typed["rows"]])
    assert {warning.filename for warning in caught} == {__file__}


def test_the_documentation_names_every_public_name_and_no_other():
    listing = (ROOT / "docs/reference/python.md").read_text()
    texts = [file.read_text() for file in (*PAGES, *(ROOT / "examples").glob("*.py"))]
    for package in (calib, fp8kv_runtime):
        name = package.__name__
        (public,) = re.findall(rf"^`{name}` has (.+?)\.$", listing, re.MULTILINE | re.DOTALL)
        assert re.findall(r"`(\w+)`", public) == sorted(package.__all__)
        found = re.findall(rf"(?<![\w./-]){name}\.(\w+)|from {name} import ([\w, ]+)", "".join(texts))
        names = {x for pair in found for x in re.findall(r"\w+", " ".join(pair))} - {"__all__"}
        assert len(names) > 5
        assert [x for x in names - {*package.__all__} if not find_spec(f"{name}.{x}")] == []


def test_completion_and_type_checkers_see_every_public_name():
    for package in (calib, calib.data, calib.formats, calib.job, fp8kv_runtime, fp8kv_runtime.hf):
        assert package not in (calib, fp8kv_runtime) or dir(package) == sorted(package.__all__)
        assert len(set(package.__all__)) == len(package.__all__) > 0
        assert all(hasattr(package, public) for public in package.__all__)
        with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'convrt'"):
            package.convrt  # noqa: B018
    tree = ast.parse(inspect.getsource(fp8kv_runtime))
    imports = [x for x in tree.body if isinstance(x, ast.ImportFrom) and "fp8kv_runtime" in x.module]
    names = {alias.name for node in imports for alias in node.names} | {*fp8kv_runtime._HOMES}
    assert names == {*fp8kv_runtime.__all__}
    # what other rooms import from a room
    trees = [
        ast.parse(file.read_text())
        for room in ("calib", "fp8kv_runtime")
        for file in ROOT.glob(f"{room}/**/*.py")
    ]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    for package in (calib.data, calib.formats, calib.job, fp8kv_runtime.hf):
        names = {x.name for node in imports if node.module == package.__name__ for x in node.names}
        assert names - {*package.__all__} == set()
    assert all(hasattr(cli, name) for name in cli.__all__)
    # without the stub every name is `Any`, and py.typed promises what is not there
    tree = ast.parse(Path(calib.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert {alias.asname: node.module for node in imports for alias in node.names} == calib._HOMES
    # a default by position is one to pydantic alone: checkers would want the argument
    recipe = ast.walk(ast.parse(inspect.getsource(calib_recipe)))
    calls = [node for node in recipe if isinstance(node, ast.Call) and ast.unparse(node.func) == "Field"]
    assert len(calls) > 20
    assert [ast.unparse(call) for call in calls if call.args] == []
