"""Layer by layer: the same bits, each byte read once, and nothing left behind."""

import re
import threading
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, HYBRIDS, LATENT, SHARED_KV, tiny_model, tiny_vision_language_model
from safetensors.torch import load_file, save_file

from calib.errors import CalibrationError, InputError
from calib.files import tensors as file_tensors
from calib.layerwise import loop, weights
from calib.layerwise.memory import MemoryPlan
from calib.progress import Progress

EVERYTHING = {"observer.name": "mse", "means": True, "targets": "qkv"}
PLENTY = 1 << 40
TINY = MemoryPlan(reads_ahead=True, hidden_bytes=0, ceiling=0)


# four layers, of which the last reads the cache of the one before it; each gets embeddings anew
PER_LAYER_INPUTS = {
    **SHARED_KV,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
    "intermediate_size": [96] * 4,
}
MODELS = {**FAMILIES, **HYBRIDS, **LATENT, "gemma3n_text": PER_LAYER_INPUTS}
SEEING = {"gemma3": {}, "paligemma": {}, "idefics3": {"model_type": "llama"}}
# layers of one kind each: what others add to them lies inside of a layer
CHOSEN = (
    *("llama", "mixtral", "gemma2", "gemma3_text", "phi3", "gpt_neox", "falcon", "gpt_oss", "gemma3n_text"),
    *HYBRIDS,
    *(
        "deepseek_v2",
        "deepseek_v32",
        "longcat_flash",
        "kimi_linear",
        "bailing_hybrid",
        "glm_moe_dsa",
        "hy_v4",
    ),
)


@pytest.mark.parametrize("family", [*CHOSEN, *SEEING])
def test_statistics_are_those_of_the_model_in_memory_bit_for_bit(family, save, assert_same):
    if family in SEEING:
        saved = save(tiny_vision_language_model(family, **SEEING[family]))
    else:
        saved = save(tiny_model(family, **MODELS[family]))
    recipe = saved.recipe(**EVERYTHING)
    batches = [replace(batch, skip_first=3) for batch in saved.batches()]
    assert not all(batch.attention_mask.all() for batch in batches)
    assert len(list(saved.path.glob("*.safetensors"))) > 3
    found = saved.by_layer(recipe, batches)
    assert_same(found, saved.in_memory(recipe, batches))
    # 5 samples of 88 tokens
    assert set(found.counts()) == {(88 - 5 * 3, 88)}


@pytest.mark.parametrize("plan", [TINY, MemoryPlan(False, 0, 0), MemoryPlan(True, 20_000, PLENTY)])
def test_nor_do_they_depend_on_where_things_are_held(plan, llama, assert_same, monkeypatch):
    monkeypatch.setattr(loop, "plan_memory", lambda *_, **__: plan)
    recipe, batches = llama.recipe(), llama.batches(size=1)
    assert_same(llama.by_layer(recipe, batches), llama.in_memory(recipe, batches))
    assert list(llama.scratch.iterdir()) == []


def test_weights_are_converted_as_transformers_converts_them(save, assert_same):
    saved = save(tiny_model("mixtral", **FAMILIES["mixtral"]))
    recipe, batches = saved.recipe(dtype="bfloat16"), saved.batches()
    assert_same(saved.by_layer(recipe, batches), saved.in_memory(recipe, batches))


def test_a_tied_embedding_may_be_stored_under_the_name_of_the_head(save, assert_same):
    saved = save(tiny_model("llama", tie_word_embeddings=True))
    index = saved.path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model.embed_tokens.weight", "lm_head.weight"))
    for shard in saved.path.glob("*.safetensors"):
        tensors = load_file(shard)
        if "model.embed_tokens.weight" in tensors:
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
            save_file(tensors, shard, {"format": "pt"})
    recipe, batches = saved.recipe(), saved.batches()
    assert_same(saved.by_layer(recipe, batches), saved.in_memory(recipe, batches))


def test_each_weight_is_read_once_and_the_head_never_and_none_stays_in_the_model(llama, monkeypatch):
    reads = []
    read = file_tensors.StoredTensor.read

    def counting(self, memory=None):
        reads.append((self.path, self.offset))
        return read(self, memory)

    monkeypatch.setattr(file_tensors.StoredTensor, "read", counting)
    recipe = llama.recipe()
    source = llama.open(recipe)
    loop.calibrate_layerwise(source, llama.batches(size=1), recipe, limit=PLENTY, directory=llama.path)
    assert len(reads) == len(set(reads)) == 3 * 9 + 2  # layers, norm and embedding
    assert {parameter.device.type for parameter in source.model.parameters()} == {"meta"}
    assert not any("forward" in vars(module) for module in source.model.modules())


def test_the_next_layer_is_read_while_one_computes(llama, monkeypatch):
    begun = [threading.Event() for _ in range(3)]
    load = weights.WeightLoader.load

    def announcing(self, stage, slab=None):
        if slab is not None:
            begun[sum(event.is_set() for event in begun)].set()
        load(self, stage, slab)

    monkeypatch.setattr(weights.WeightLoader, "load", announcing)
    waited = []

    def wait_for_next(label):
        if label.startswith(("layer 1 of 3, batch 1 ", "layer 2 of 3, batch 1 ")):
            waited.append(begun[int(label.split()[1])].wait(timeout=60))

    llama.by_layer(llama.recipe(), llama.batches(), progress=Progress(on_detail=wait_for_next))
    assert waited == [True] * len(waited) != []


def test_progress_names_layer_and_batch(llama):
    labels, tokens = [], []
    progress = Progress(on_detail=labels.append, on_advance=tokens.append)
    llama.by_layer(llama.recipe(), llama.batches(), progress=progress)
    assert sum(tokens) == pytest.approx(88)
    assert labels[0] == "layer 1 of 3, batch 1 of 4"
    assert labels[-1] == "layer 3 of 3, batch 4 of 4"
    assert len(labels) == len(set(labels)) == 12
    with pytest.raises(InputError, match="no token was read"):
        llama.by_layer(llama.recipe(), [])


def poison_token(model):
    model.model.embed_tokens.weight[77] = float("nan")


def poison_last_value(model):
    model.model.layers[2].self_attn.v_proj.weight[0] = 3e38


def poison_token_and_query(model):
    # layer 0 finds the token in a late batch, layer 1 something in the first
    poison_token(model)
    model.model.layers[1].self_attn.q_proj.weight[0] = 3e38


@pytest.mark.parametrize("poison", [poison_token, poison_last_value, poison_token_and_query])
def test_non_finite_numbers_are_blamed_as_in_memory(poison, save):
    model = tiny_model("llama")
    with torch.no_grad():
        poison(model)
    saved = save(model)
    samples = [[5, 6, 7, 8, 9], [8, 9, 10, 3, 4], [11, 77, 12], [13, 14, 15], [9, 77, 77]]
    recipe, batches = saved.recipe(), saved.batches(samples)
    errors = []
    for run in (saved.in_memory, saved.by_layer):
        with pytest.raises(CalibrationError) as raised:
            run(recipe, batches)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
    assert re.search(r"model\.layers\.\d\.self_attn: [KVQ] holds NaN or Inf in sample \d;", errors[0])


def test_nothing_more_is_read_once_the_first_sample_is_to_blame(save, monkeypatch):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("nan"))
    saved, loaded = save(model), []
    load = weights.WeightLoader.load
    monkeypatch.setattr(
        weights.WeightLoader, "load", lambda self, *args: (loaded.append(args), load(self, *args))
    )
    with pytest.raises(CalibrationError, match="sample 0"):
        saved.by_layer(saved.recipe(), saved.batches())
    # twice what is resident, the embeddings, the first layer and the one behind it
    assert len(loaded) <= 2 * 4


def test_numbers_that_fail_in_a_batch_but_not_alone_are_blamed_on_the_batch(llama, monkeypatch):
    measured = iter(["model.layers.0.self_attn: K", None])
    monkeypatch.setattr(loop.loop, "first_non_finite", lambda own: next(measured, None))
    batches = llama.batches()
    with pytest.raises(CalibrationError, match=r"a layer holds .* in samples \[0, 1\], only when"):
        llama.by_layer(llama.recipe(), batches)


def test_an_interrupted_pass_leaves_no_files(llama, monkeypatch):
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


def test_a_missing_scratch_directory_is_an_error_of_one_line(llama, monkeypatch):
    monkeypatch.setattr(loop, "plan_memory", lambda *_, **__: TINY)
    recipe = llama.recipe()
    source, gone = llama.open(recipe), llama.path / "gone"
    with pytest.raises(InputError, match=r"gone': No such file or directory; set TMPDIR"):
        loop.calibrate_layerwise(source, llama.batches(), recipe, limit=PLENTY, directory=gone)


def test_too_little_memory_says_how_much_is_enough(llama, monkeypatch):
    monkeypatch.setattr(loop, "resident_bytes", lambda: 1 << 30)
    recipe, batches = llama.recipe(), llama.batches()
    with pytest.raises(InputError, match=r"use --max-memory [\d.]+GiB or more") as raised:
        llama.by_layer(recipe, batches, limit=(1 << 30) + 1000)
    enough = float(re.search(r"--max-memory ([\d.]+)GiB", str(raised.value))[1])
    assert llama.by_layer(recipe, batches, limit=int(enough * 2**30)).tokens == 88
