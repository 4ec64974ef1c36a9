"""Queries are measured, rounded and simulated as engines hand them to attention."""

from types import SimpleNamespace

import pytest
import torch
from command_line import SMALL, fp8kv, one_line_error
from families import save_model, tiny_model

from calib.caches.types import Shape
from calib.capture.attention import map_attention
from calib.capture.capabilities import engine_class
from calib.capture.loop import calibrate
from calib.capture.training import scales_for
from calib.data import make_batches
from calib.errors import InputError
from calib.evaluate.attention_modes import check_model, simulate_attention
from calib.recipe import Recipe, load_recipe
from calib.scales.stats import derive_scales
from fp8kv_runtime.engine_attention import fa3_attention, vllm_triton_attention
from fp8kv_runtime.fp8 import dequantize, quantize
from fp8kv_runtime.hf import fp8_attention, swap_attention
from fp8kv_runtime.options import AttentionOptions

IDS = torch.tensor([[1, 5, 81, 7, 44, 9, 3, 99, 12, 6]])
RECIPE = load_recipe(None, {"device": "cpu", "targets": "qkv", "strategy": "attn_head"})


@pytest.fixture(scope="module")
def opt():
    return tiny_model("opt", num_hidden_layers=2)


@pytest.fixture(scope="module")
def stats(opt):
    return calibrate(opt, make_batches(IDS.tolist(), 1, pad_id=0), RECIPE)


@torch.inference_mode()
def projected(model):
    """By layer, the query [1, H, T, D] before OPT multiplies it, as its class in vLLM has it."""
    made, hooks = [], []
    for module in map_attention(model).cached:
        attention = model.get_submodule(module)
        hooks.append(attention.q_proj.register_forward_hook(lambda *call: made.append(call[-1].clone())))
    model(IDS)
    for hook in hooks:
        hook.remove()
    return [q.view(1, len(IDS[0]), 4, 16).transpose(1, 2) for q in made]


@pytest.mark.parametrize(("mode", "kernel"), [("fa3", fa3_attention), ("vllm_triton", vllm_triton_attention)])
@torch.inference_mode()
def test_kernels_are_simulated_with_the_query_that_an_engine_rounds(mode, kernel, opt, stats):
    queries, calls = projected(opt), []
    attend = simulate_attention(mode, derive_scales(stats, RECIPE), with_queries=False, dtype=torch.float32)

    def compare(original, module, query, key, value, *args, **kwargs):
        found, _ = attend(original, module, query, key, value, *args, **kwargs)
        calls.append((found, key, value))
        return original(module, query, key, value, *args, **kwargs)

    with swap_attention(opt, compare):
        opt(IDS)
    visible = torch.ones(10, 10, dtype=torch.bool).tril()[None, None]
    for query, (found, key, value) in zip(queries, calls, strict=True):
        expected = kernel(query, key, value, visible, AttentionOptions(16**-0.5))
        assert torch.equal(found, expected.transpose(1, 2))


@torch.inference_mode()
def test_queries_are_measured_and_rounded_as_an_engine_does_before_the_model_scales_them(opt, stats):
    scales, queries = derive_scales(stats, RECIPE), projected(opt)
    for layer, query in zip(stats.layers.values(), queries, strict=True):
        assert torch.equal(layer.q.amax, query.abs().amax((0, 2)))  # 16 ** -0.5 is exact
    layers = {layer.layer_idx: layer for layer in scales.layers.values()}

    def logits(attend):
        with attend:
            return opt(IDS, use_cache=False).logits

    def by_hand(original, module, query, key, value, *args, **kwargs):
        layer = layers[module.layer_idx]
        q, k, v = (scale.view(-1, 1, 1) for scale in (layer.q, layer.k, layer.v))
        if module.layer_idx == 0:
            assert torch.equal(query * 4, queries[0])
        query = dequantize(quantize(query * 4, q), q) / 4
        key, value = dequantize(quantize(key, k), k), dequantize(quantize(value, v), v)
        return original(module, query, key, value, *args, **kwargs)

    expected = logits(swap_attention(opt, by_hand))
    runtime = logits(fp8_attention(opt, scales, backend="torch", quantize_query=True))
    torch.testing.assert_close(runtime, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_a_class_that_nothing_is_shown_of_is_refused_where_its_query_matters(tmp_path):
    model = tiny_model("bitnet", num_hidden_layers=2)
    said = "which query engines hand to attention is not known for BitNetForCausalLM"
    with pytest.raises(InputError, match=said):
        scales_for(model, [IDS], recipe=Recipe(targets="qkv"))
    shapes = [Shape(2, 32, 32, "heads")]
    # a factor that engines leave out of the query changes how FP8 rounds and cuts it off
    for mode in ("fa3", "vllm_triton_fp8"):
        with pytest.raises(InputError, match=said):
            check_model(mode, model, shapes)
    check_model("vllm_triton", model, shapes)
    save_model(model, tmp_path / "model")
    commands = (("calibrate", "--targets", "qkv", "-o", tmp_path / "out"), ("eval", "--attention", "fa3"))
    for command, *flags in commands:
        one_line_error(fp8kv(command, tmp_path / "model", *SMALL, *flags), said)
    for named, name in ((["A", "B"], "A"), ("A", "A"), ([], "other"), (None, "other")):
        assert engine_class(SimpleNamespace(architectures=named), "other") == name
