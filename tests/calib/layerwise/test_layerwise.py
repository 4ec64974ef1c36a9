"""Layer by layer: the same bits, each byte read once, nothing left behind; or refused before any is read."""

import re
import threading
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from families import FAMILIES, HYBRIDS, LATENT, SHARED_KV, edit_json, tiny_model
from families import tiny_vision_language_model as tiny_seeing_model
from safetensors.torch import load_file, save_file
from transformers.models.idefics3.modeling_idefics3 import Idefics3Model
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from calib.capture.attention import AttentionMap
from calib.errors import CalibrationError, InputError, UnsupportedModelError
from calib.files.tensors import StoredTensor
from calib.layerwise import loop, weights
from calib.layerwise.memory import MemoryPlan
from calib.layerwise.probe import find_layers, random_bytes, random_weights
from calib.layerwise.weights import plan_stages
from calib.progress import Progress

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
    progress, source = Progress(on_detail=labels.append, on_advance=tokens.append), llama.open(recipe)
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
    llama.by_layer(llama.recipe(), llama.batches(), progress=Progress(on_detail=wait_for_next))
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
    assert re.search(r"model\.layers\.\d\.self_attn: [KVQ] holds NaN or Inf in sample \d;", errors[0])


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

    with pytest.raises(KeyboardInterrupt):
        llama.by_layer(llama.recipe(), llama.batches(), progress=Progress(on_detail=interrupt))
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
