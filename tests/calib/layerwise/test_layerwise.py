"""Layer by layer: the same bits, each byte read once, nothing left behind; when, and with how much memory."""

import os
import re
import resource
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from command_line import calibrate, one_line_error
from families import FAMILIES, HYBRIDS, LATENT, SHARED_KV, edit_json, tiny_model
from families import tiny_vision_language_model as tiny_seeing_model
from processes import assert_as_before, held
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.idefics3.modeling_idefics3 import Idefics3Model
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from calib.capture.attention import AttentionMap
from calib.errors import CalibrationError, InputError, UnsupportedModelError
from calib.files.model_directory import open_model_directory
from calib.files.tensors import StoredTensor, stored_tensors
from calib.files.text import parse_size, show_size
from calib.layerwise import loop, memory, weights
from calib.layerwise.hidden import HiddenStates, to_meta
from calib.layerwise.loop import scratch_directory
from calib.layerwise.memory import MemoryPlan, available_bytes
from calib.layerwise.probe import find_layers, random_bytes, random_weights
from calib.layerwise.replay import Replay
from calib.layerwise.weights import plan_stages
from calib.models.config import load_config
from calib.models.sources import find_model
from calib.progress import Progress
from calib.recipe import load_recipe

TINY = MemoryPlan(reads_ahead=True, hidden_bytes=0, ceiling=0)


# four layers, of which the last reads the cache of the one before it; each gets embeddings anew
PER_LAYER_INPUTS = SHARED_KV | {"num_hidden_layers": 4, "intermediate_size": [96] * 4}
PER_LAYER_INPUTS |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
PER_LAYER_INPUTS |= {"activation_sparsity_pattern": [0.0] * 4}
MODELS = {**FAMILIES, **HYBRIDS, **LATENT, "gemma3n_text": PER_LAYER_INPUTS}
SEEING = {"gemma3": {}, "paligemma": {}, "idefics3": {"model_type": "llama"}}
# layers of one kind each: what others add to them lies inside of a layer
CHOSEN = [
    *("llama", "mixtral", "gemma2", "gemma3_text", "phi3", "gpt_neox", "falcon", "gpt_oss", "gemma3n_text"),
    *("deepseek_v2", "deepseek_v32", "longcat_flash", "kimi_linear", "bailing_hybrid", "glm_moe_dsa"),
    *("hy_v4", *HYBRIDS),
]


@pytest.mark.parametrize("family", [*CHOSEN, *SEEING])
def test_statistics_are_those_of_the_model_in_memory_bit_for_bit(family, save):
    if family in SEEING:
        saved = save(tiny_seeing_model(family, **SEEING[family]))
    else:
        saved = save(tiny_model(family, **MODELS[family]))
    everything = {"observer.name": "mse", "means": True, "targets": "qkv"}
    recipe = saved.recipe(**everything, dtype="bfloat16" if family == "mixtral" else "auto")
    batches = [replace(batch, skip_first=3) for batch in saved.batches()]
    assert len(list(saved.path.glob("*.safetensors"))) > 3
    assert set(saved.check(recipe, batches).counts()) == {(88 - 5 * 3, 88)}  # 5 samples of 88 tokens


@pytest.mark.parametrize("plan", [TINY, MemoryPlan(False, 0, 0), MemoryPlan(True, 20_000, 1 << 40)])
def test_nor_do_they_depend_on_where_things_are_held(plan, llama, monkeypatch):
    monkeypatch.setattr(loop, "plan_memory", lambda *_, **__: plan)
    llama.check(llama.recipe(), llama.batches(size=1))
    assert list(llama.scratch.iterdir()) == []


def test_the_model_is_as_before_after_an_error_in_a_replay_and_on_the_way_in(llama, monkeypatch):
    source = llama.open(llama.recipe())
    layer, last = source.parts.layers[0], source.model.get_input_embeddings()
    own = layer.forward = lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)
    before = held(source.model)
    with pytest.raises(KeyError), Replay(source.model, source.parts):
        assert layer.forward is not own
        raise KeyError
    assert_as_before(source.model, before)

    def refuse(module, name, value):
        assert layer.forward is not own
        raise KeyError

    with monkeypatch.context() as patch:
        patch.setattr(type(last), "__setattr__", refuse)  # the last forward to be replaced
        with pytest.raises(KeyError), Replay(source.model, source.parts):
            raise AssertionError("inside")
    assert_as_before(source.model, before)


def test_a_tied_embedding_may_be_stored_under_the_name_of_the_head(save):
    saved = save(tiny_model("llama", tie_word_embeddings=True))
    index = saved.path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model.embed_tokens.weight", "lm_head.weight"))
    for shard in saved.path.glob("*.safetensors"):
        tensors = load_file(shard)
        if "model.embed_tokens.weight" in tensors:
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
            save_file(tensors, shard, {"format": "pt"})
    saved.check(saved.recipe(), saved.batches())


def test_each_weight_is_read_once_and_stays_nowhere_and_progress_names_layer_and_batch(llama):
    labels, tokens, recipe = [], [], llama.recipe()
    progress, source = Progress(), llama.open(recipe)
    progress.detail, progress.advance = labels.append, tokens.append
    given = {"limit": 1 << 40, "directory": llama.path, "progress": progress}
    with patch.object(StoredTensor, "read", autospec=True, side_effect=StoredTensor.read) as read:
        loop.calibrate_layerwise(source, llama.batches(), recipe, **given)
    reads = [(call.args[0].path, call.args[0].offset) for call in read.call_args_list]
    assert len(reads) == len(set(reads)) == 3 * 9 + 2  # layers, norm and embedding, and never the head
    assert {parameter.device.type for parameter in source.model.parameters()} == {"meta"}
    assert not any("forward" in vars(module) for module in source.model.modules())
    assert sum(tokens) == pytest.approx(88)
    assert (labels[0], labels[-1]) == ("layer 1 of 3, batch 1 of 4", "layer 3 of 3, batch 4 of 4")
    assert len(labels) == len(set(labels)) == 12
    with pytest.raises(InputError, match="no token was read"):
        llama.by_layer(recipe, [])


def test_the_next_layer_is_read_while_one_computes(llama, monkeypatch):
    begun, waited, load = [threading.Event() for _ in range(3)], [], weights.WeightLoader.load

    def announcing(self, stage, slab=None):
        if slab is not None:
            begun[sum(event.is_set() for event in begun)].set()
        load(self, stage, slab)

    def wait_for_next(label):
        if label.startswith(("layer 1 of 3, batch 1 ", "layer 2 of 3, batch 1 ")):
            waited.append(begun[int(label.split()[1])].wait(timeout=60))

    monkeypatch.setattr(weights.WeightLoader, "load", announcing)
    progress = Progress()
    progress.detail = wait_for_next
    llama.by_layer(llama.recipe(), llama.batches(), progress=progress)
    assert waited == [True] * 2


TOKEN = "embed_tokens", 77, float("nan")
QUERY = "layers.1.self_attn.q_proj", 0, 3e38


# at last layer 0 finds the token in a late batch, and layer 1 something in the first
@pytest.mark.parametrize("poison", [[TOKEN], [("layers.2.self_attn.v_proj", 0, 3e38)], [TOKEN, QUERY]])
def test_non_finite_numbers_are_blamed_as_in_memory(poison, save):
    model = tiny_model("llama")
    with torch.no_grad():
        for name, row, value in poison:
            model.model.get_submodule(name).weight[row] = value
    saved = save(model)
    samples = [[5, 6, 7, 8, 9], [8, 9, 10, 3, 4], [11, 77, 12], [13, 14, 15], [9, 77, 77]]
    recipe, batches, errors = saved.recipe(), saved.batches(samples), []
    for way in (saved.in_memory, saved.by_layer):
        with pytest.raises(CalibrationError) as raised:
            way(recipe, batches)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
    assert re.search(r"model\.layers\.\d\.self_attn: [KVQ] holds NaN or Inf in sample \d of those", errors[0])


def test_nothing_more_is_read_once_the_first_sample_is_to_blame(save):
    model, loader = tiny_model("llama"), weights.WeightLoader
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("nan"))
    saved, counted = save(model), patch.object(loader, "load", autospec=True, side_effect=loader.load)
    with counted as load, pytest.raises(CalibrationError, match="sample 0"):
        saved.by_layer(saved.recipe(), saved.batches())
    # twice what is resident, the embeddings, the first layer and the one behind it
    assert load.call_count <= 2 * 4


def test_numbers_that_fail_in_a_batch_but_not_alone_are_blamed_on_the_batch(llama, monkeypatch):
    measured = iter(["model.layers.0.self_attn: K", None])
    monkeypatch.setattr(loop.loop, "first_non_finite", lambda *_: next(measured, None))
    with pytest.raises(CalibrationError, match=r"a layer holds .* in samples \[0, 1\], only when"):
        llama.by_layer(llama.recipe(), llama.batches())


def test_an_interrupted_pass_leaves_no_files_and_a_missing_scratch_directory_is_one_line(llama, monkeypatch):
    monkeypatch.setattr(loop, "plan_memory", lambda *_, **__: TINY)
    files = []

    def interrupt(label):
        files.extend(llama.scratch.rglob("hidden-*"))
        if label.startswith("layer 2 "):
            raise KeyboardInterrupt

    progress = Progress()
    progress.detail = interrupt
    with pytest.raises(KeyboardInterrupt):
        llama.by_layer(llama.recipe(), llama.batches(), progress=progress)
    assert files
    assert list(llama.scratch.iterdir()) == []
    recipe = llama.recipe()
    source, gone = llama.open(recipe), llama.path / "gone"
    with pytest.raises(InputError, match=r"gone': No such file or directory; set TMPDIR"):
        loop.calibrate_layerwise(source, llama.batches(), recipe, limit=1 << 40, directory=gone)
    assert not any("forward" in vars(module) for module in source.model.modules())


def test_too_little_memory_says_how_much_is_enough(llama, monkeypatch):
    monkeypatch.setattr(loop, "resident_bytes", lambda: 1 << 30)
    recipe, batches = llama.recipe(), llama.batches()
    with pytest.raises(InputError, match=r"use --max-memory [\d.]+GiB or more") as raised:
        llama.by_layer(recipe, batches, limit=(1 << 30) + 1000)
    enough = float(re.search(r"--max-memory ([\d.]+)GiB", str(raised.value))[1])
    assert llama.by_layer(recipe, batches, limit=int(enough * 2**30)).tokens == 88
    with pytest.raises(InputError, match="^1 KiB of memory is too little: 1.00GiB are in use and one layer"):
        llama.open(llama.recipe(max_memory="1 KiB"))


def test_a_model_is_refused_where_its_decoder_alone_caches_something_else(save, monkeypatch):
    saved = save(tiny_seeing_model("idefics3", model_type="llama"))
    attention, forward = saved.open(saved.recipe()).parts.attention, Idefics3Model.forward
    assert (attention.reader, attention.note) == ("model.text_model", "")

    def moved(self, input_ids, attention_mask, **kwargs):
        positions = torch.arange(1, input_ids.shape[1] + 1)[None]
        return forward(self, input_ids, attention_mask, position_ids=positions, **kwargs)

    def needing_pictures(self, input_ids, **kwargs):
        raise ValueError("pixel_values are missing")

    monkeypatch.setattr(Idefics3Model, "forward", needing_pictures)
    said = "the decoder alone was measured, as the whole model takes no text alone: pixel_values are missing"
    assert saved.open(saved.recipe()).parts.attention.note == said
    monkeypatch.setattr(Idefics3Model, "forward", moved)
    with pytest.raises(UnsupportedModelError, match=r"other K or V than its decoder alone.*none"):
        saved.open(saved.recipe())


@pytest.fixture
def _reads_nothing(monkeypatch):
    monkeypatch.setattr(StoredTensor, "read", lambda *_: pytest.fail("a weight was read"))


def leave_behind(self, forward, left, hidden_states, **kwargs):
    # what the second layer finds there is that of the last batch, not of its own
    if self.self_attn.layer_idx == 0:
        left["behind"] = hidden_states[:1, :1].clone()
    return forward(self, hidden_states + left["behind"], **kwargs)


def hand_over(self, forward, left, hidden_states, position_embeddings, **kwargs):
    cos, _ = position_embeddings  # made anew by each forward pass
    if self.self_attn.layer_idx == 0:
        cos.handed_over = hidden_states
    return forward(self, hidden_states + cos.handed_over, position_embeddings=position_embeddings, **kwargs)


@pytest.mark.usefixtures("_reads_nothing")
@pytest.mark.parametrize("exchange", [leave_behind, hand_over])
def test_layers_that_exchange_more_than_hidden_states_are_refused(exchange, llama, monkeypatch):
    forward, left = LlamaDecoderLayer.forward, {}
    changed = lambda self, *args, **kwargs: exchange(self, forward, left, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(LlamaDecoderLayer, "forward", changed)
    with pytest.raises(UnsupportedModelError, match=r"exchange more .* use --offload none"):
        llama.open(llama.recipe())


def test_a_decoder_without_one_list_of_layers_and_weights_that_layers_share_are_refused(tiny_llama, llama):
    attention = AttentionMap({"model.layers.0.self_attn": None, "model.other": None}, {}, "model")
    with pytest.raises(UnsupportedModelError, match="not in one list of decoder layers"):
        find_layers(tiny_llama, attention)
    model = llama.open(llama.recipe()).model
    layers = model.model.layers
    layers[2].mlp.up_proj.weight = layers[1].mlp.up_proj.weight
    with pytest.raises(UnsupportedModelError, match=r"layers.2.mlp.up_proj.weight' is shared"):
        plan_stages(model, list(layers), [], {}, [])


@pytest.mark.usefixtures("_reads_nothing")
def test_quantised_weights_are_refused(llama):
    edit_json(llama.path / "config.json", quantization_config={"quant_method": "hqq"})
    with pytest.raises(InputError, match=r"are quantised.*--offload none"):
        llama.open(llama.recipe())


def test_random_weights_are_one_layers_and_go_again(llama):
    decoder = llama.open(llama.recipe()).model.get_decoder()
    one_layer = sum(p.nbytes for p in decoder.layers[0].parameters())
    assert random_bytes(decoder) == one_layer + decoder.norm.weight.nbytes
    with random_weights(decoder, torch.device("cpu")):
        first, second = (layer.mlp.up_proj.weight for layer in decoder.layers[:2])
        assert first.data_ptr() == second.data_ptr()
        assert not any(p.is_meta for p in decoder.parameters())
        assert torch.isfinite(decoder.embed_tokens.weight[:64]).all()
    assert all(p.is_meta for p in decoder.parameters())


GIB = 1 << 30


@pytest.fixture
def resolve(tiny_directory, monkeypatch):
    """What becomes of `offload` in a process of 1 GiB, on a machine that has 10 GiB left."""
    monkeypatch.setattr(memory, "resident_bytes", lambda: GIB)
    monkeypatch.setattr(memory, "available_bytes", lambda: 10 * GIB)

    def resolve(weights, config=None, **changes):
        monkeypatch.setattr(memory, "_weight_bytes", lambda *_: weights)
        recipe, checkpoint = load_recipe(None, {"device": "cpu", **changes}), find_model(str(tiny_directory))
        return memory.resolve_offload(checkpoint, config or load_config(checkpoint), recipe)

    return resolve


def test_auto_is_layerwise_where_weights_do_not_fit_or_it_is_refused(resolve, tiny_directory, tmp_path):
    for nbytes, changes, expected in (
        (5 * GIB, {}, "none"),
        (9.5 * GIB, {}, "layerwise"),
        (5 * GIB, {"max_memory": "6GiB"}, "layerwise"),
        (4 * GIB, {"max_memory": "6GiB"}, "none"),
        (50 * GIB, {"offload": "none"}, "none"),
        (1, {"offload": "layerwise"}, "layerwise"),
        (1 * GIB, {"data.dataset": "self"}, "none"),
    ):
        assert resolve(nbytes, **changes) == expected
    with pytest.raises(InputError, match="take 5.00GiB, too much for --max-memory 4GiB"):
        resolve(5 * GIB, offload="none", max_memory="4GiB")
    with pytest.raises(InputError, match="dataset 'self'.*builtin:python-docs"):
        resolve(50 * GIB, **{"data.dataset": "self"})
    config = load_config(find_model(str(tiny_directory)))
    config.quantization_config = {"quant_method": "fp8"}
    assert resolve(50 * GIB, config) == "none"
    done = calibrate(tiny_directory, "-o", tmp_path / "out", "--offload", "layerwise", "--resume")
    one_line_error(done, "saves no progress; leave --resume away")


def test_on_gpus_their_free_memory_counts(resolve, monkeypatch):
    monkeypatch.setattr(memory, "uses_gpu", lambda recipe: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (8 * GIB, 80 * GIB))
    # on their way weights take none of the machine's own memory
    assert [resolve(14 * GIB), resolve(15 * GIB)] == ["none", "layerwise"]
    assert resolve(5 * GIB, max_memory="4GiB") == "layerwise"


def test_converting_weights_needs_both(tiny_directory):
    checkpoint = find_model(str(tiny_directory))
    stored, config = (tiny_directory / "model.safetensors").stat().st_size, load_config(checkpoint)
    for dtype, needed in (("auto", stored), ("float32", stored), ("bfloat16", stored + stored // 2)):
        assert memory._weight_bytes(checkpoint, config, dtype) == needed


def test_sizes_are_read_and_shown_large_enough():
    texts = {"8GiB": 8 << 30, "500MB": 500_000_000, "1.5 gb": 1_500_000_000, "7B": 7}
    assert {text: parse_size(text) for text in texts} == texts
    shown = [show_size(size) for size in (1, 5 << 20, GIB + 1, 3 * GIB // 2)]
    assert shown == ["1MiB", "5MiB", "1.01GiB", "1.50GiB"]
    for text in ("8", "GiB", "-1GiB", "8 elephants", "0GiB", "1e9B", "8GiB!"):
        with pytest.raises(InputError, match=r"is not an amount of memory; .* such as 8GiB"):
            parse_size(text)
    with pytest.raises(InputError, match="max_memory"):
        load_recipe(None, {"max_memory": "8"})


def test_a_containers_limit_counts_on_every_level(tmp_path, monkeypatch):
    inner = tmp_path / "job" / "step"
    inner.mkdir(parents=True)
    for group, limit, usage in ((inner, "max", "0\nfile 9"), (inner.parent, 5000, "2000\nfile 2500")):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.stat").write_text(f"anon {usage}\n")
    (tmp_path / "self").write_text("0::/job/step\n")
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=8192))
    monkeypatch.setattr(memory, "_GROUP", tmp_path / "self")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    assert available_bytes() == 3000
    (inner.parent / "memory.max").write_text("50000\n")
    assert available_bytes() == 8192


def test_hidden_states_go_to_tmpdir_or_beside_the_output(tmp_path, monkeypatch):
    monkeypatch.delenv("TMPDIR", raising=False)
    assert scratch_directory(tmp_path / "not" / "yet" / "there") == tmp_path
    monkeypatch.setenv("TMPDIR", "/somewhere")
    assert str(scratch_directory(tmp_path)) == "/somewhere"


# in a new process: a fork has free memory of its parent's, which is not counted
MEASURE = """
import sys
from pathlib import Path
from conftest import Saved
from calib.layerwise.loop import calibrate_layerwise
from calib.layerwise.memory import resident_bytes

saved = Saved(Path(sys.argv[1]), Path(sys.argv[1]))
source, before = saved.open(saved.recipe()), resident_bytes()
allowed, samples, tokens, size = map(int, sys.argv[2:])
batches = saved.batches([[7] * tokens] * samples, size)
calibrate_layerwise(source, batches, saved.recipe(), limit=before + allowed, directory=saved.path)
status = Path("/proc/self/status").read_text()
print(int(status.partition("VmHWM:")[2].split()[0]) * 1024 - before)
"""


def peak(directory, *numbers):
    """Bytes that a pass takes at most, beside what its process takes anyway."""
    command = [sys.executable, "-c", MEASURE, str(directory), *map(str, numbers)]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return int(subprocess.check_output(command, env=own))


def test_the_memory_limit_is_kept_by_weights(tmp_path):
    weights = write_llama(tmp_path, num_hidden_layers=12, hidden_size=1024, intermediate_size=2816)
    allowed = 110 << 20
    assert weights > 4 * allowed
    found = peak(tmp_path, allowed, 4, 16, 1)
    assert 2 * weights // 12 < found <= allowed  # two layers, one being read ahead


def test_the_memory_limit_is_kept_by_hidden_states(tmp_path):
    write_llama(tmp_path, num_hidden_layers=3, hidden_size=256, intermediate_size=64)
    allowed, samples, tokens = 64 << 20, 512, 128
    assert samples * tokens * 256 * 4 >= allowed
    slack = 16 << 20  # freed pages go back to the system a little later than new ones are taken
    assert peak(tmp_path, allowed, samples, tokens, 16) <= allowed + slack
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}


def write_llama(directory, **sizes):
    """Save a Llama of these sizes in small shards; return the bytes of its weights."""
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=2, vocab_size=100, **sizes)
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory, max_shard_size="50MB")
    return sum(weight.nbytes for weight in model.parameters())


CPU = torch.device("cpu")
TENSORS = {
    "a": torch.arange(35, dtype=torch.float32).view(5, 7),
    "b": torch.arange(-3, 3, dtype=torch.bfloat16),
    "c": torch.tensor(2.5, dtype=torch.float64),
    "e": torch.zeros(0, 4),
    "f": torch.tensor([1, 2, 3], dtype=torch.uint8),
}


@pytest.fixture
def checkpoint(tiny_directory):
    save_file(TENSORS, tiny_directory / "model.safetensors", {"format": "pt"})
    return find_model(str(tiny_directory))


def test_tensors_are_read_as_safetensors_reads_them_and_damage_is_one_line(checkpoint):
    stored = stored_tensors(checkpoint)
    assert stored.keys() == TENSORS.keys()
    with safe_open(checkpoint.path / "model.safetensors", framework="pt") as file:
        for name, tensor in TENSORS.items():
            read = stored[name].read()
            assert read.dtype == tensor.dtype
            assert torch.equal(read, tensor)
            # float32 matrix products differ in their last bits between alignments
            mapped = file.get_slice(name)[...] if tensor.dim() else read
            assert not tensor.numel() or (read.data_ptr() - mapped.data_ptr()) % 64 == 0
    memory = torch.full((stored["a"].room,), 7, dtype=torch.uint8)  # that is given
    read = stored["a"].read(memory)
    assert torch.equal(read, TENSORS["a"])
    assert read.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    path, stored = checkpoint.path / "model.safetensors", stored_tensors(checkpoint)
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    with pytest.raises(InputError, match="ends early; download the model again"):
        for tensor in stored.values():
            tensor.read()
    path.write_bytes(data.replace(b'"dtype":"BF16"', b'"dtype": "U16"'))
    with pytest.raises(InputError, match=r"holds 'b' as U16.*--offload none"):
        stored_tensors(open_model_directory(checkpoint.path))


@pytest.mark.parametrize("room", [0, 10_000])
def test_outputs_come_back_as_they_were(room, tmp_path):
    output = (torch.randn(2, 5).T, None, torch.arange(3), torch.randn(4, 5)[:, 1:3].bfloat16())
    with HiddenStates(tmp_path, room) as store:
        store.put(("hidden", 0), output)
        for give in (store.get, store.take):
            for x, y in zip(give(("hidden", 0), CPU), output, strict=True):
                assert (x is None) == (y is None)
                assert x is None or (x.dtype == y.dtype and torch.equal(x, y))
                assert x is None or x.stride() in (y.stride(), torch.empty_like(y).stride())
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_within_a_file_is_an_error_of_one_line(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        said = "File too large; set TMPDIR"
        with HiddenStates(tmp_path, 0) as store, pytest.raises(InputError, match=said):
            store.put(("hidden", 0), torch.zeros(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_room_in_memory_is_used_again(tmp_path):
    kilobyte = torch.zeros(1024, dtype=torch.uint8)
    form, nothing = to_meta((kilobyte, None))
    assert (form.is_meta, form.shape, nothing) == (True, kilobyte.shape, None)
    with HiddenStates(tmp_path, 1500) as store:
        store.put(("hidden", 0), kilobyte)
        store.put(("hidden", 1), kilobyte)
        assert len(list(tmp_path.rglob("hidden-*"))) == 1
        store.take(("hidden", 0), CPU)
        store.put(("hidden", 2), kilobyte)
        assert len(list(tmp_path.rglob("hidden-*"))) == 1
