"""Scales of a model in memory: the command's, bit for bit, and the model is left as it was."""

import re
import runpy
import threading
import warnings
from pathlib import Path

import pytest
import torch
from command_line import calibrate, succeeded
from families import FAMILIES, LATENT, SHARED_KV, save_model, tiny_model
from families import tiny_vision_language_model as tiny_seeing_model
from safetensors.torch import load_file
from torch import nn

from calib.capture.attention import map_attention
from calib.capture.training import scales_for
from calib.data import load_data, make_batches
from calib.errors import CalibrationError, Fp8kvError, InputError
from calib.files.model_directory import open_model_directory
from calib.files.names import SCALES_SHARD
from calib.formats import export
from calib.models.load import load_tokenizer
from calib.recipe import Recipe, load_recipe
from calib.strict_yaml import StrictModel

# little text does for this
pytestmark = [
    pytest.mark.filterwarnings("ignore:only .* tokens were read:UserWarning"),
    pytest.mark.filterwarnings("ignore:the 160 samples are alike:UserWarning"),
]
GENERATOR = torch.Generator().manual_seed(1)
ROWS = torch.randint(3, 128, (4, 24), generator=GENERATOR)
EXAMPLE = Path(__file__).parents[3] / "examples" / "training_loop.py"


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert one
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize(
    ("strategy", "targets", "format", "skip_first"),
    [
        ("attn_head", "qkv", "vllm", 3),
        ("tensor", "kv", "sglang", 0),
        ("tensor", "kv", "modelopt", 3),
        ("tensor", "kv", "vllm-nvfp4", 0),
    ],
)
def test_the_scales_are_the_commands_bit_for_bit(
    strategy, targets, format, skip_first, tiny_llama, tiny_directory, tmp_path
):
    flags = {"strategy": strategy, "targets": targets, "data.skip_first": skip_first}
    given = [f"--set={key}={value}" for key, value in flags.items()]
    succeeded(calibrate(tiny_directory, "-o", tmp_path / "out", f"--format={format}", *given))
    of_data = {"data.dataset": "random", "data.samples": 4, "data.seq_len": 32}
    recipe = load_recipe(None, {**flags, **of_data})
    tokenizer = load_tokenizer(open_model_directory(tiny_directory))
    samples = load_data(recipe.data, tokenizer, lambda: tiny_llama).samples
    # as many in a pass as the command takes: matrix kernels may round by their number
    batches = make_batches(samples, 4096 // 32, pad_id=0)
    given = [{"input_ids": b.input_ids, "attention_mask": b.attention_mask} for b in batches]
    found = scales_for(tiny_llama, given, format=format, recipe=recipe)
    assert_same(found, load_file(tmp_path / "out" / SCALES_SHARD))


@pytest.mark.parametrize("family", ["mixtral", "phi3", "gemma3n_text", "gemma3", "llama4"])
def test_names_are_those_of_a_checkpoint_of_the_model(family, tmp_path):
    kinds = {**FAMILIES, "gemma3n_text": SHARED_KV}
    made = tiny_model(family, **kinds[family]) if family in kinds else tiny_seeing_model(family)
    save_model(made, tmp_path / "saved")
    loaded = type(made).from_pretrained(tmp_path / "saved")
    units = map_attention(loaded).unit_scales()
    checkpoint = open_model_directory(tmp_path / "saved")
    for format in ("vllm", "sglang"):
        wanted = names_or_refusal(lambda f=format: export(units, checkpoint, f).tensors)
        for model in (made, loaded):
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                found = names_or_refusal(lambda f=format, m=model: scales_for(m, [ROWS], format=f))
            assert found == wanted


def names_or_refusal(make):
    try:
        return {*make()}
    except Fp8kvError as error:
        return re.sub(r"'\S+'", "", str(error))


class Held:
    """All that can be seen of a model, and of torch's state."""

    def __init__(self, model):
        self.objects = {
            (name, *place): value
            for name, module in model.named_modules()
            for place, value in objects(vars(module))
        }
        weights = dict(model.named_parameters())
        self.flags = {n: (w.requires_grad, w.dtype, w.device) for n, w in weights.items()}
        self.grads = {name: weight.grad for name, weight in weights.items()}
        self.config = (model.config.to_dict(), model.config._attn_implementation)
        tensors = {**model.state_dict(), **dict(model.named_buffers())}
        self.values = {name: tensor.clone() for name, tensor in tensors.items()}
        self.generator, self.grad_mode = torch.get_rng_state(), torch.is_grad_enabled()


def objects(attributes):
    """What a module holds: in its own attributes, and in its tables of weights, buffers, hooks."""
    for key, value in attributes.items():
        if isinstance(value, dict):
            yield from (((key, inner), each) for inner, each in value.items())
        else:
            yield (key,), value


def assert_as_before(model, before):
    after = Held(model)
    for one, other in ((after.objects, before.objects), (after.grads, before.grads)):
        assert one.keys() == other.keys()
        # compared by identity: what was replaced by its equal has been changed too
        assert [key for key in one if one[key] is not other[key]] == []
    assert (after.flags, after.config) == (before.flags, before.config)
    assert after.values.keys() == before.values.keys()
    assert all(torch.equal(x, before.values[name]) for name, x in after.values.items())
    assert torch.equal(after.generator, before.generator)
    assert after.grad_mode == before.grad_mode


@pytest.fixture(params=["default", "longrope"])
def in_training(request):
    """A model between two steps of a trainer."""
    rope = {"rope_type": request.param, "rope_theta": 10000.0, "original_max_position_embeddings": 8}
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
    return model


def drawing(error=None):
    """Batches of a loader that draws random numbers, and may break."""
    for row in ROWS:
        torch.rand(3)
        yield row[None]
    if error:
        raise error


def test_the_model_is_left_as_it_was_also_after_errors(in_training):
    before = Held(in_training)
    first = scales_for(in_training, drawing())
    assert_as_before(in_training, before)
    assert_same(first, scales_for(in_training, drawing()))
    with pytest.raises(OSError, match="the loader broke"):
        scales_for(in_training, drawing(OSError("the loader broke")))
    assert_as_before(in_training, before)
    with pytest.raises(InputError, match="token id 128"):
        scales_for(in_training, [ROWS, ROWS + 128 - ROWS.max()])
    assert_as_before(in_training, before)
    in_training(input_ids=ROWS, labels=ROWS).loss.backward()
    with torch.no_grad():
        in_training.get_input_embeddings().weight[2] = float("inf")
    before, bad = Held(in_training), ROWS.clone()
    bad[1, 5] = 2
    with pytest.raises(CalibrationError, match="model.layers.0.self_attn: K .* in sample 5;"):
        scales_for(in_training, [ROWS, bad])
    assert_as_before(in_training, before)


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
        hidden = model.model(input_ids=ROWS[:1]).last_hidden_state
        (hidden * kept[0][0]).sum().backward()


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
            scales_for(model, few, recipe=Recipe(data={"allow_few_tokens": True}))
        assert any("tokens were read" in str(each.message) for each in said)


def test_the_docstring_names_the_keys_of_recipes_that_count(monkeypatch):
    read = set()

    def recording(at, given):
        class Recording(type(given)):
            def __getattribute__(self, name):
                value = super().__getattribute__(name)
                if name not in type(given).model_fields:
                    return value
                if not isinstance(value, StrictModel):
                    read.add(at + name)
                    return value
                return recording(f"{at}{name}.", value)

        return Recording.model_construct(**dict(given))

    made = load_recipe(None, {"headroom": "auto"})
    monkeypatch.setattr(Recipe, "model_copy", lambda *_, **__: recording("", made))
    scales_for(tiny_model("llama"), [ROWS] * 40, recipe=made)
    listed = re.search("these count: (.*?)\\. `", scales_for.__doc__, re.DOTALL)[1]
    named = set(re.split(r",\s+|\s+and\s+", listed))
    # the observer counts as a whole; means are collected and make no scale
    assert {re.sub(r"observer\..*", "observer", key) for key in read - {"means"}} == named


def test_another_thread_with_the_same_model_is_refused():
    model, refused = tiny_model("llama"), []
    expected, before = scales_for(model, [ROWS]), Held(model)

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


class Adapters(nn.Module):
    """As PEFT's models show what is inside."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def get_base_model(self):
        return self.base_model


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # which torch.compile imports
@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, Adapters])
def test_wrapped_models(wrap):
    model = tiny_model("llama")
    expected = scales_for(model, [ROWS])
    wrapped = wrap(nn.DataParallel(model))
    before = Held(model)
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


def spread_out():
    model = tiny_model("llama")
    model.lm_head.weight.ds_id = 0
    return model


def configured(**changes):
    model = tiny_model("llama")
    vars(model.config).update(changes)
    return model


def deepseek():
    return tiny_model("deepseek_v3", **LATENT["deepseek_v3"])


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda: nn.Linear(2, 2), {}, "Linear is neither a transformers model"),
        (lambda: configured().model, {}, "not a causal language model"),
        (lambda: configured().to("meta"), {}, "are on device meta"),
        (lambda: configured(_attn_implementation_internal="mine"), {}, "no attention .* 'mine'"),
        (lambda: configured(quantization_config={"quant_method": "bitsandbytes"}), {}, "are quantised"),
        (spread_out, {}, "spread over processes"),
        (configured, {"format": "json"}, "use format='vllm'"),
        (configured, {"format": "tgi", "strategy": "attn_head"}, "reads tensor scales"),
        (configured, {"recipe": Recipe(targets="qkv"), "format": "tgi"}, "holds no query scales"),
        (deepseek, {}, "MLA"),
        (deepseek, {"strategy": "attn_head"}, "one latent per token and layer"),
    ],
)
def test_refusals_are_one_line(make, options, words):
    with pytest.raises(Fp8kvError, match=words) as refused:
        scales_for(make(), [ROWS], **options)
    assert "\n" not in str(refused.value)


def test_what_is_not_known_of_the_engine_is_a_warning():
    model = tiny_model("llama")
    model.__class__ = type("LlamaOfMineForCausalLM", (type(model),), {})
    with pytest.warns(UserWarning, match="whether vLLM loads these scales is not known"):
        scales_for(model, [ROWS])


def test_the_example_runs(capsys):
    found = runpy.run_path(str(EXAMPLE))
    assert capsys.readouterr().out.count("K scale of layer 0") == 3
    held, scales = found["engine"].weights, found["scales"]
    assert_same({name: held[name] for name in scales}, scales)
    assert held.keys() - scales.keys() == dict(found["model"].named_parameters()).keys()
