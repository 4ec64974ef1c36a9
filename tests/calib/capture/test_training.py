"""Scales of a model in memory: the command's, bit for bit, for all forms of batches; nothing is changed."""

import re
import threading
from collections import UserDict
from functools import partial

import pytest
import torch
from command_line import calibrate, succeeded
from families import FAMILIES, LATENT, SHARED_KV, save_model, tiny_model, tiny_vision_language_model
from processes import assert_as_before, assert_same, held
from safetensors.torch import load_file
from torch import nn

from calib.capture.attention import map_attention
from calib.capture.training import scales_for
from calib.data import Batch, load_data, make_batches
from calib.errors import CalibrationError, Fp8kvError, InputError
from calib.files.model_directory import open_model_directory
from calib.files.names import SCALES_SHARD
from calib.formats import export
from calib.formats.base import refusals_of
from calib.models.load import load_tokenizer
from calib.recipe import Recipe, load_recipe
from calib.strict_yaml import StrictModel

# little text does for this
pytestmark = [
    pytest.mark.filterwarnings("ignore:only .* tokens:UserWarning"),
    pytest.mark.filterwarnings("ignore:the 160 samples are alike:UserWarning"),
]
GENERATOR = torch.Generator().manual_seed(1)
ROWS = torch.randint(3, 128, (4, 24), generator=GENERATOR)
FEW = Recipe(data={"allow_few_tokens": True})
TEXT = ROWS[:1, :18]
LEFT = torch.cat([torch.zeros(1, 6, dtype=torch.int64), TEXT], 1)
SHAPES = r"token ids must be whole numbers \[B, T\], a list of rows \[T\], "
SHAPES += "or a mapping of input_ids and attention_mask"
REAL = torch.tensor([[0] * 6 + [1] * 18])
POSITIONS = (REAL.cumsum(1) - 1).clamp(min=0)


def test_the_scales_are_the_commands_bit_for_bit(tiny_llama, tiny_directory, tmp_path):
    for strategy, targets, format, skip_first in (
        ("attn_head", "qkv", "vllm", 3),
        ("tensor", "kv", "sglang", 0),
        ("tensor", "kv", "modelopt", 3),
        ("tensor", "kv", "vllm-nvfp4", 0),
    ):
        flags = {"strategy": strategy, "targets": targets, "data.skip_first": skip_first}
        given = [f"--set={key}={value}" for key, value in flags.items()]
        succeeded(calibrate(tiny_directory, "-o", tmp_path / format, f"--format={format}", *given))
        of_data = {"data.dataset": "random", "data.samples": 4, "data.seq_len": 32}
        recipe = load_recipe(None, {**flags, **of_data})
        tokenizer = load_tokenizer(open_model_directory(tiny_directory))
        samples = load_data(recipe.data, tokenizer, lambda: tiny_llama).samples
        # as many in a pass as the command takes: matrix kernels may round by their number
        batches = make_batches(samples, 4096 // 32, pad_id=0)
        given = [{"input_ids": b.input_ids, "attention_mask": b.attention_mask} for b in batches]
        found = scales_for(tiny_llama, given, format=format, recipe=recipe)
        assert_same(found, load_file(tmp_path / format / SCALES_SHARD))


def names_or_refusal(make):
    try:
        with refusals_of("scales_for"):
            return {*make().keys()}
    except Fp8kvError as error:
        return re.sub(r"'\S+'", "", str(error))


@pytest.mark.parametrize("family", ["mixtral", "phi3", "gemma3n_text", "gemma3", "llama4"])
def test_names_are_those_of_a_checkpoint_of_the_model(family, tmp_path):
    kinds = {**FAMILIES, "gemma3n_text": SHARED_KV}
    made = tiny_model(family, **kinds[family]) if family in kinds else tiny_vision_language_model(family)
    save_model(made, tmp_path / "saved")
    loaded = type(made).from_pretrained(tmp_path / "saved")
    units, checkpoint = map_attention(loaded).unit_scales(), open_model_directory(tmp_path / "saved")
    for format in ("vllm", "sglang"):
        wanted = names_or_refusal(lambda f=format: export(units, checkpoint, f).tensors)
        for model in (made, loaded):
            assert names_or_refusal(lambda f=format, m=model: scales_for(m, [ROWS], format=f)) == wanted


def drawing(error=None):
    """Batches of a loader that draws random numbers, and may break."""
    for row in ROWS:
        torch.rand(3)
        yield row[None]
    if error:
        raise error


@pytest.mark.parametrize("rope_type", ["default", "longrope"])
def test_a_model_in_training_is_left_as_it_was_also_after_errors(rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "original_max_position_embeddings": 8}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model = tiny_model("llama", rope_parameters=rope).train()
    model.model.norm.eval()
    # which transformers calls otherwise since 5.2x
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable()
    model.enable_input_require_grads()
    model.lm_head.weight.requires_grad_(False)
    model.config.use_cache = False
    model.model.layers[1].register_forward_hook(lambda *_: None)
    # shorter than what is measured: `longrope` has other frequencies for more than 8 tokens
    model(input_ids=ROWS[:, :6], labels=ROWS[:, :6]).loss.backward()
    before = held(model)
    first = scales_for(model, drawing())
    assert_as_before(model, before)
    assert_same(first, scales_for(model, drawing()))
    with pytest.raises(OSError, match="the loader broke"):
        scales_for(model, drawing(OSError("the loader broke")))
    assert_as_before(model, before)
    with pytest.raises(InputError, match="token id 128"):
        scales_for(model, [ROWS, ROWS + 128 - ROWS.max()])
    assert_as_before(model, before)
    model(input_ids=ROWS, labels=ROWS).loss.backward()
    with torch.no_grad():
        model.get_input_embeddings().weight[2] = float("inf")
    before, bad = held(model), ROWS.clone()
    bad[1, 5] = 2
    with pytest.raises(CalibrationError, match="model.layers.0.self_attn: K .* in sample 5 of those read;"):
        scales_for(model, [ROWS, bad])
    assert_as_before(model, before)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_surrounding_mode_of_gradients_does_not_matter_and_is_that_of_a_generator(mode):
    model, kept = tiny_model("llama").train(), []

    def made():
        for row in ROWS:
            kept.append((torch.ones(1, len(row), 64), torch.is_grad_enabled()))
            yield row[None]

    with mode():
        found, gradients = scales_for(model, made()), torch.is_grad_enabled()
    assert not any(scale.is_inference() or scale.requires_grad for scale in found.values())
    assert_same(scales_for(model, [row[None] for row in ROWS]), found)
    is_inference = mode is torch.inference_mode
    assert [(made.is_inference(), mode) for made, mode in kept] == [(is_inference, gradients)] * len(ROWS)
    if not is_inference:
        (model.model(input_ids=ROWS[:1]).last_hidden_state * kept[0][0]).sum().backward()


def test_little_text_is_a_warning_and_next_to_none_is_refused():
    model = tiny_model("llama")
    with pytest.warns(UserWarning, match="only 96 tokens were read") as said:
        scales_for(model, [ROWS])
    assert len(said) == 1
    with pytest.warns(UserWarning, match="the 48 samples are alike: 1,056 of 1,152 tokens repeat"):
        scales_for(model, [ROWS] * 12)
    for few, words in (
        ([ROWS[:1]], "24 tokens, 19 of them different"),
        ([ROWS[:1, :8]] * 8, r"64 tokens, [78] of them .* \(the 8 samples are alike"),
    ):
        with pytest.raises(InputError, match=f"{words}.*data.allow_few_tokens"):
            scales_for(model, few)
        with pytest.warns(UserWarning, match="tokens") as said:
            scales_for(model, few, recipe=FEW)
        assert any("tokens were read" in str(each.message) for each in said)


def test_the_docstring_names_the_keys_of_recipes_that_count(monkeypatch):
    read, recipe, get = set(), Recipe(headroom="auto"), StrictModel.__getattribute__
    fields = {name for part in (recipe, recipe.data, recipe.export) for name in type(part).model_fields}
    monkeypatch.setattr(StrictModel, "__getattribute__", lambda self, key: read.add(key) or get(self, key))
    rows = torch.randint(64, (40, 4, 24), generator=torch.Generator().manual_seed(0))
    scales_for(tiny_model("llama"), [*rows], recipe=recipe)
    listed = re.search("these count: (.*?)\\. `", scales_for.__doc__, re.DOTALL)[1]
    # means are collected and make no scale; a check of the whole recipe reads formats
    found = read & fields - {"data", "export", "means", "formats"}
    assert found == {key.split(".")[-1] for key in re.split(r",\s+|\s+and\s+", listed)}


def test_another_thread_with_the_same_model_is_refused():
    model, refused = tiny_model("llama"), []
    expected, before = scales_for(model, [ROWS]), held(model)

    def other():
        with pytest.raises(InputError, match="another thread measures this model"):
            scales_for(model, [ROWS])
        refused.append(True)

    def batches():
        yield ROWS
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    assert_same(scales_for(model, batches()), expected)
    assert refused
    assert_as_before(model, before)
    assert_same(scales_for(model, [ROWS]), expected)


class Adapters(nn.Sequential):
    def get_base_model(self):
        return self[0]  # as PEFT's models show what is inside


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # which torch.compile imports
@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, Adapters])
def test_wrapped_models(wrap):
    model = tiny_model("llama")
    expected, wrapped = scales_for(model, [ROWS]), wrap(nn.DataParallel(model))
    before = held(model)
    assert_same(scales_for(wrapped, [ROWS]), expected)
    assert_as_before(model, before)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_code_is_not_run():
    model, ran = tiny_model("llama"), []
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(backend=lambda graph, _: ran.append(graph) or graph.forward)
    found = scales_for(model, [ROWS])
    assert ran == []
    assert_same(found, scales_for(tiny_model("llama"), [ROWS]))
    with torch.no_grad():
        model(ROWS)
    assert ran


def changed(mark=None, **config):
    model = tiny_model("llama")
    vars(model.lm_head.weight).update(mark or {})
    vars(model.config).update(config)
    return model


DEEPSEEK = partial(tiny_model, "deepseek_v3", **LATENT["deepseek_v3"])


PER_HEAD = (
    "^format tgi: it holds tensor scales, for TGI; these have strategy 'attn_head'. "
    "Use strategy tensor, or the recipe's export.reduce max, or format vllm or aphrodite$"
)


def test_refusals_are_one_line_and_what_is_not_known_of_the_engine_is_a_warning():
    for make, options, words in (
        (lambda: nn.Linear(2, 2), {}, "Linear is neither a transformers model"),
        (lambda: changed().model, {}, "not a causal language model"),
        (lambda: changed().to("meta"), {}, "are on device meta"),
        (lambda: changed(_attn_implementation_internal="mine"), {}, "no attention .* 'mine'"),
        (lambda: changed(quantization_config={"quant_method": "bitsandbytes"}), {}, "are quantised"),
        (lambda: changed({"ds_id": 0}), {}, "spread over processes"),
        (changed, {"format": "json"}, "use format='vllm'"),
        (changed, {"format": "tgi", "strategy": "attn_head"}, PER_HEAD),
        (
            changed,
            {"recipe": Recipe(targets="qkv"), "format": "tgi"},
            "Use the recipe's targets kv, or format vllm$",
        ),
        (changed, {"recipe": Recipe(center_keys=True)}, "leave out the recipe's center_keys$"),
        (DEEPSEEK, {}, "MLA"),
        (DEEPSEEK, {"strategy": "attn_head"}, "one latent per token and layer"),
    ):
        with pytest.raises(Fp8kvError, match=words):
            scales_for(make(), [ROWS], **options)
    model = tiny_model("llama")
    model.__class__ = type("LlamaOfMineForCausalLM", (type(model),), {})
    with pytest.warns(UserWarning, match="whether vLLM loads these scales is not known"):
        scales_for(model, [ROWS])


class Rows:
    """A dataset without an iterator."""

    def __getitem__(self, index):
        return {"input_ids": ROWS[index]}  # an IndexError ends it


def test_forms_of_batches():
    for batches in (
        *([TEXT[0]], [TEXT[0].tolist()], [ROWS.numpy()], [[*ROWS.numpy()]], Rows()),
        [{"input_ids": TEXT, "labels": TEXT + 1}],
        [UserDict(input_ids=TEXT.tolist(), attention_mask=None)],
        [{"input_ids": LEFT, "attention_mask": REAL}],
        [{"input_ids": LEFT, "attention_mask": REAL, "position_ids": POSITIONS, "rewards": [1.0]}],
        [{"input_ids": LEFT.tolist(), "attention_mask": REAL.bool().tolist()}],
        [Batch(TEXT, torch.ones_like(TEXT), sample_ids=(0,), first_token=0)],
        [{"input_ids": ROWS.numpy(), "position_ids": torch.arange(24)[None]}],
    ):
        model = tiny_model("llama")
        found = scales_for(model, batches, recipe=FEW)
        assert found in [scales_for(model, [rows], recipe=FEW) for rows in (TEXT, ROWS)]


def test_zeros_that_say_that_all_is_text():
    model, text = tiny_vision_language_model(), {"input_ids": ROWS, "token_type_ids": torch.zeros_like(ROWS)}
    assert scales_for(model, [text]) == scales_for(model, [ROWS])
    text["token_type_ids"][0, 3] = 1
    with pytest.raises(InputError, match="token_type_ids can change"):
        scales_for(model, [text])


def test_rows_that_are_skipped_whole_are_left_out():
    model, recipe = tiny_model("llama"), Recipe(data={"skip_first": 3})
    assert scales_for(model, [ROWS[:, :3], ROWS], recipe=recipe) == scales_for(model, [ROWS], recipe=recipe)
    with pytest.raises(InputError, match="no token was read that counts"):
        scales_for(model, [ROWS[:, :3]], recipe=recipe)


def test_what_would_be_misread_is_one_line():
    for batches, words in (
        ([], "no token was read that counts"),
        ([[]], rf"{SHAPES}, got \[\]"),
        ([[[], [1, 2]]], rf"{SHAPES}, got \[\[\], \[1, 2"),
        ([[ROWS, ROWS > 0]], rf"{SHAPES}, got a list of int64 \[4, 24\], bool \[4, 24\]"),
        ([(ROWS, ROWS)], rf"{SHAPES}, got a tuple of int64 \[4, 24\], int64"),
        ([ROWS > 0], rf"{SHAPES}, got bool \[4, 24\]; give a mask under attention_mask"),
        ({"input_ids": ROWS}, "batches must be a list or loader of batches, also for a single one"),
        (None, "batches must be a list or loader .* got None"),
        ([ROWS.float()], f"{SHAPES}, got float32"),
        ([{"labels": ROWS}], f"{SHAPES}, got None"),
        ([{"input_ids": ROWS, "attention_mask": 2 * ROWS}], "attention_mask must be"),
        ([{"input_ids": ROWS, "attention_mask": ROWS[:, 1:]}], "attention_mask must be"),
        ([{"input_ids": ROWS, "position_ids": ROWS[:1]}], "position_ids can change K and V"),
        ([{"input_ids": ROWS, "seq_idx": ROWS}], "seq_idx can change K and V"),
        ([ROWS[None]], rf"{SHAPES}, got int64 \[1, 4, 24\]"),
        ([{"input_ids": ROWS, "inputs_embeds": ROWS.float()}], "inputs_embeds can change K and V"),
        ([ROWS, ROWS + 120], "batch 1: token id 2.. is not one of"),
        ([-ROWS], "batch 0: token id -"),
        ([torch.ones(300).int()], "300 tokens is longer than the model's 256"),
    ):
        model = tiny_model("llama")
        # which hides no argument
        model.forward = lambda *args, forward=model.forward, **kwargs: forward(*args, **kwargs)
        with pytest.raises(InputError, match=words):
            scales_for(model, batches)
