"""What stands in for attention: that it refuses, in words that say what to do, and leaves no trace."""

import copy
import re
import traceback
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fake_quant import scales_for
from families import FAMILIES, LATENT, ONE_MODULE, tiny_model
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, OPTConfig, StaticCache
from transformers.models.opt.modeling_opt import OPTAttention

from calib.scales.scales import KVScales, LayerScales
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.hf import EngineQuery, attention, fp8_attention, paged_cache, swap_attention
from fp8kv_runtime.hf.attention import check_mask
from fp8kv_runtime.hf.rows import CacheRows, left_padding

ALL, IDS = {**FAMILIES, **LATENT, **ONE_MODULE}, torch.arange(3, 11)[None]
PAD = "this model or input needs another one. Pad on the left, or use the torch backend"
BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def scales(model):
    return scales_for(model)


def fingerprint(model):
    """Hooks, `forward`, index and attention implementation of every module; functions of all."""
    own = ("_forward_pre_hooks", "_forward_hooks", "forward", "layer_idx")
    return (
        [[copy.copy(vars(module).get(name)) for name in own] for module in model.modules()],
        [getattr(getattr(x, "config", None), "_attn_implementation", None) for x in model.modules()],
        [dict(kind._global_mapping) for kind in (AttentionInterface, AttentionMaskInterface)],
    )


NO_SCALES, TRITON = KVScales("tensor", "e4m3fn", {}), {"backend": "triton"}
MLA, USE_TORCH = "deepseek_v3", "use the torch backend"
REFUSED = {
    "no layer has scales, so there is nothing to hold in FP8": ("llama", {"scales": NO_SCALES}),
    "FP8 queries need query scales and one K scale per tensor or head: calibrate with --targets qkv "
    "--strategy tensor or attn_head": ("llama", {"quantize_query": True}),
    "this model calls attention itself: its queries cannot be reached": ("falcon", {"quantize_query": True}),
    f"FalconForCausalLM calls attention itself and cannot be given kernels; {USE_TORCH}": ("falcon", TRITON),
    f"DeepseekV3ForCausalLM caches a latent (MLA), which no Triton kernel reads; {USE_TORCH}": (MLA, TRITON),
    "scales must be as calib.load_scales returns them, got 'scales'": ("llama", {"scales": "scales"}),
    "backend must be one of auto, triton, torch, got 'cuda'": ("llama", {"backend": "cuda"}),
    "block_size must be a whole number from 1 on, got 0": ("llama", {"block_size": 0}),
}


def assert_refused(message, model, **arguments):
    with pytest.raises(AttentionError, match=f"^{re.escape(message)}$"), fp8_attention(model, **arguments):
        model(IDS)


def test_what_does_not_fit_is_refused_before_anything_runs(model, scales, monkeypatch):
    for message, (family, changes) in REFUSED.items():
        other = tiny_model(family, **ALL[family])
        other.forward = None  # which would be called in the block
        assert_refused(message, other, **{"scales": scales_for(other)} | changes)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    no_gpu = "the Triton kernels need a GPU, or TRITON_INTERPRET=1; use torch"
    assert_refused(no_gpu, model, scales=scales, backend="triton")


def test_caches_that_are_not_its_own_and_a_block_in_a_block_are_refused_an_empty_cache_is_not(model, scales):
    cache = model(IDS, use_cache=True).past_key_values
    with torch.inference_mode(), fp8_attention(model, scales):
        with pytest.raises(AttentionError, match="^the cache holds 16-bit K and V already; start with an e"):
            model(IDS, past_key_values=cache)
        with pytest.raises(AttentionError, match="is StaticLayer; give generate a DynamicCache"):
            model(IDS, past_key_values=StaticCache(config=model.config, max_cache_len=16))
        with pytest.raises(AttentionError, match="^give the model input_ids or inputs_embeds$"):
            model()
        for ids in (IDS[:0], IDS[:, :0]):
            with pytest.raises(AttentionError, match=r"^the batch is empty: \[rows, tokens\] are "):
                model(ids)
        with pytest.raises(AttentionError, match="inside an fp8_attention block: leave that one first"):
            fp8_attention(model, scales).__enter__()
        own = DynamicCache()
        expected = model(IDS).logits
        assert torch.equal(model(IDS, past_key_values=own).logits, expected)
    with pytest.raises(AttentionError, match="would hold 1 rows of 9 tokens, not 1 of 8"):
        model(IDS[:, :1], past_key_values=own)


@BACKENDS
def test_a_pass_that_failed_before_its_first_layer_leaves_no_trace_and_one_half_way_is_told(
    backend, model, scales, monkeypatch
):
    caches = [DynamicCache(), DynamicCache(config=model.config)]
    with torch.inference_mode(), fp8_attention(model, scales, backend=backend, block_size=4):
        for cache in caches:
            with pytest.raises(IndexError):
                model(IDS + 10**6, past_key_values=cache)
            model(IDS[:, :4], past_key_values=cache)
        with pytest.raises(IndexError):
            model(IDS[:, 4:] + 10**6, past_key_values=caches[0])
        assert torch.equal(*(model(IDS[:, 4:], past_key_values=cache).logits for cache in caches))
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(model.model.layers[1], "forward", lambda *_, **__: 1 // 0)
            model(IDS, past_key_values=cache)
        with pytest.raises(AttentionError, match="hold 8 to 16 tokens: an earlier forward pass"):
            model(IDS, past_key_values=cache)
        monkeypatch.setattr(type(model.model.layers[0]), "forward", lambda _, hidden, **__: hidden)
        with pytest.raises(AttentionError, match="the model stored nothing in the FP8 cache"):
            model(IDS)


@pytest.mark.parametrize("block", ["fp8", "measured"])
@pytest.mark.parametrize("family", ["llama", "falcon", "deepseek_v3", "zamba", "zamba2"])
def test_a_block_leaves_no_trace_also_after_an_error_and_in_it_a_model_is_not_copied(block, family):
    model = tiny_model(family, **ALL[family])
    before, scales = fingerprint(model), scales_for(model)

    def enter():
        if block == "fp8":
            return fp8_attention(model, scales)
        return swap_attention(model, lambda original, *args, **kwargs: original(*args, **kwargs))

    with torch.inference_mode():
        plain = model(IDS).logits
        with pytest.raises(KeyError), enter():
            for part in (model, model.get_decoder()):
                with pytest.raises(AttentionError, match="copy the model before that block, or after"):
                    copy.deepcopy(part)
            expected = model(IDS).logits
            # the other changes a name that compares as before
            assert fingerprint(model) != before or block == "measured"
            raise KeyError
        assert fingerprint(model) == before
        assert not any("fp8kv" in key for module in model.modules() for key in vars(module))
        after = model(IDS)
        assert torch.equal(after.logits, plain)
        assert torch.equal(copy.deepcopy(model)(IDS).logits, plain)
        with enter():
            assert torch.equal(model(IDS).logits, expected)
    with pytest.raises(ValueError, match="^this cache holds no FP8 blocks: it was not filled inside fp8_att"):
        paged_cache(after.past_key_values)


def test_a_forward_of_the_decoders_own_is_put_back(model, scales, monkeypatch):
    decoder = model.get_decoder()
    own = partial(type(decoder).forward, decoder)  # as hooks of accelerate leave one
    monkeypatch.setitem(vars(decoder), "forward", own)
    for error in (None, KeyError):
        with suppress(KeyError), fp8_attention(model, scales, backend="torch"):
            model(IDS)
            if error:
                raise error
        assert vars(decoder)["forward"] is own


@BACKENDS
def test_inputs_may_be_given_by_position(backend, model, scales):
    decoder, caches = model.model, [DynamicCache(config=model.config) for _ in "abc"]
    with torch.inference_mode(), fp8_attention(model, scales, backend=backend):
        for ids, length in ((IDS[:, :5], 5), (IDS[:, 5:], 8)):
            mask = torch.ones(1, length, dtype=torch.long)
            found = decoder(ids, mask, None, caches[0])
            expected = decoder(ids, attention_mask=mask, past_key_values=caches[1])
            assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
        assert paged_cache(caches[0]).bytes_per_token
        with pytest.raises(TypeError, match="multiple"):
            decoder(IDS, input_ids=IDS)
    with fp8_attention(model.requires_grad_(False), scales, backend="torch"):  # as with an adapter of Q
        decoder.layers[0].self_attn.q_proj.requires_grad_()
        sum(decoder(IDS[:, :1], past_key_values=caches[2])[0].sum() for _ in "abcd").backward()


def test_scales_of_other_heads_and_padding_that_kernels_do_not_know(model, scales, device):
    three = torch.ones(3)
    layers = {name: LayerScales(s.layer_idx, three, three) for name, s in scales.layers.items()}
    message = "scales for 3 KV heads do not fit a layer with 2: they are of another model"
    assert_refused(message, model, scales=KVScales("attn_head", "e4m3fn", layers))
    mask = torch.ones_like(IDS).to(device)
    mask[0, -2:] = 0
    with fp8_attention(model.to(device), scales, backend="triton"), pytest.raises(AttentionError, match=PAD):
        model(IDS.to(device), attention_mask=mask)
    model.cpu()


def causal(window=None, starts=(0, 2)):
    rows, columns = torch.arange(3, 6)[:, None], torch.arange(6)[None]
    visible = (columns <= rows) & (columns >= torch.tensor(starts)[:, None, None])
    return visible[:, None] if window is None else (visible & (columns > rows - window))[:, None]


def test_masks_that_kernels_apply_and_those_that_they_do_not():
    for window in (None, 2):
        for mask in (causal(window), torch.zeros(2, 1, 3, 6).masked_fill(~causal(window), -torch.inf)):
            check_mask(mask, 3, torch.tensor([0, 2]), window)
    assert left_padding(torch.ones(2, 5)).tolist() == [0, 0]
    assert left_padding(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])).tolist() == [2, 0, 4]
    for mask, starts, window in (
        (causal(), [0, 1], None),
        (causal(), [0, 2], 2),
        (causal(2), [0, 2], None),
        (causal(2), [0, 2], 3),
        (torch.ones(2, 1, 3, 6, dtype=torch.bool), [0, 2], None),
        (torch.tensor([[1, 1, 1], [0, 1, 1]]), None, None),
        (torch.tensor([[1, 1, 0], [0, 1, 1]]), [0, 1], None),
    ):
        with pytest.raises(AttentionError, match=f"^the Triton kernels apply causal masks with a .* {PAD}$"):
            check_mask(mask, 3, None if starts is None else torch.tensor(starts), window)


def test_a_mask_that_several_layers_share_is_checked_for_each_window(monkeypatch):
    checked = []
    monkeypatch.setattr(attention, "check_mask", lambda *arguments: checked.append(arguments[-1]))
    rows, one, other = SimpleNamespace(checked_masks=[]), causal(), causal()
    for mask, window in ((one, None), (one, None), (one, 2), (one, 2), (one, 3), (other, 3)):
        attention._check_mask_once(rows, mask, 3, None, window)
    assert checked == [None, 2, 3, 3]


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_replacements_see_each_call_of_one_model_can_change_the_result_nest_and_unwind(family):
    model, other = (tiny_model(family, **FAMILIES[family]) for _ in "ab")
    before, calls, padded = fingerprint(model), [], torch.ones_like(IDS)
    padded[0, -2:] = 0

    def noting(name, factor=1):
        def note(original, module, query, key, value, *args, **kwargs):
            calls.append((name, module.layer_idx))
            return original(module, query, key, factor * value, *args, **kwargs)

        return note

    with torch.inference_mode():
        plain = model(IDS, attention_mask=padded).logits
        with swap_attention(model, noting("out")):
            with swap_attention(model, noting("in")):
                assert torch.equal(model(IDS, attention_mask=padded).logits, plain)
            other(IDS)
            assert not torch.allclose(model(IDS).logits, plain)
        assert calls == [(n, i) for i in range(3) for n in ("in", "out")] + [("out", i) for i in range(3)]
        with swap_attention(model, noting("changing", 0)):
            assert not torch.allclose(model(IDS, attention_mask=padded).logits, plain)
        assert torch.equal(model(IDS, attention_mask=padded).logits, plain)
    assert fingerprint(model) == before


def test_opt_multiplies_its_query_before_attention_and_engines_do_not():
    module = OPTAttention(OPTConfig(hidden_size=64, num_attention_heads=4), layer_idx=0)
    plain = torch.randn(1, 4, 3, 16)
    for kind, query, scaling in ((module, plain / 4, 1.0), (torch.nn.Identity(), plain, 0.25)):
        engines = EngineQuery.of(kind, query, scaling)
        assert torch.equal(engines.query, plain)
        assert engines.scaling == 0.25
        assert torch.equal(engines.undo(8 * plain), 8 * query)
        assert engines.undo(engines.query) is query


class HostReads(TorchFunctionMode, list):
    """Files of ours that read a tensor, for which a program would wait for a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
        if func.__name__ in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "equal", "nonzero"):
            self.append(next(file for file in files if "/torch/" not in file))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("padding", [0, 2])
def test_a_step_of_kernels_reads_nothing_on_a_gpu_and_its_masks_are_told_later(padding, scales, monkeypatch):
    model, mask, logits = tiny_model("llama", num_hidden_layers=2), (2 + padding < IDS).long(), []
    for waits in (False, True):  # what stands in for a GPU
        monkeypatch.setattr(CacheRows, "waits", lambda *_, waits=waits: waits)
        message, block = pytest.raises(AttentionError, match=PAD), fp8_attention(model, scales, **TRITON)
        with message, torch.inference_mode(), block:
            cache = model(IDS, attention_mask=mask).past_key_values
            longer = {"attention_mask": pad(mask, (0, 1), value=1), "past_key_values": cache}
            with HostReads() as reads:
                logits.append(model(IDS[:, :1], **longer).logits)
            assert waits == all("fp8kv_runtime" not in file for file in reads)
            model(IDS[:, :1], **longer | {"attention_mask": pad(mask, (0, 2))})
            assert waits, "a CPU tells at once"
    assert torch.equal(*logits)
