"""The layers that a checkpoint leaves in 16 bits: in vLLM's words, in ModelOpt's, and taken by our plugin."""

import logging
from types import ModuleType, SimpleNamespace

import pytest
from scale_directories import CONFIG, MODELOPT, model

from calib.errors import InputError
from calib.files.model_directory import open_model_directory
from calib.files.skipped_layers import skipped_layers
from calib.files.stored_scales import read_scales
from calib.serving import plugin
from calib.serving.vllm_engine import watch_arguments

FP8 = {"quant_algo": "FP8"}


def modelopt(layers, schema=1):
    """ModelOpt's config with a map of layers."""
    map_of_layers = {"kv_cache_quantized_layers": layers, "kv_cache_schema_version": schema}
    return MODELOPT | {"kv_cache_quant_algo": "MIXED_PRECISION"} | map_of_layers


SECOND = modelopt({"model.layers.1.self_attn": FP8})


def test_both_lists_are_read_and_what_is_not_known_is_refused(tmp_path):
    assert skipped_layers(open_model_directory(model(tmp_path / "none"))) == ()
    directory = model(tmp_path / "own", kv_cache_dtype_skip_layers=[1])
    assert skipped_layers(open_model_directory(directory)) == (1,)
    directory = model(tmp_path / "modelopt", config=SECOND, kv_cache_dtype_skip_layers=[0])
    assert skipped_layers(open_model_directory(directory)) == (0,)
    assert read_scales(directory).fp8_dtype == "e4m3fn"
    # a module of multi-token prediction is no layer of the decoder
    layers = dict.fromkeys(("model.layers.1.self_attn", "mtp.layers.0.self_attn", "model.layers.2.attn"), FP8)
    assert skipped_layers(open_model_directory(model(tmp_path / "mtp", config=modelopt(layers)))) == (0,)
    for document, words in (
        ({"kv_cache_dtype_skip_layers": "sliding_window"}, "is 'sliding_window'; it is a list of layer indi"),
        ({"kv_cache_dtype_skip_layers": [2]}, r"is \[2\]; it is a list of layer indices, 0 to 1"),
        ({"kv_cache_dtype_skip_layers": [True]}, r"is \[True\]"),
        ({"kv_cache_dtype_skip_layers": [0], "num_hidden_layers": None}, "does not say how many layers"),
        ({"config": SECOND, "kv_cache_dtype_skip_layers": [1]}, "leave different layers in 16 bits"),
        ({"config": modelopt({"model.layers.0.self_attn": {"quant_algo": "NVFP4"}})}, "in 'NVFP4'; only lay"),
        ({"config": modelopt({"lm_head": FP8})}, "has 'lm_head' in 'FP8'"),
        ({"config": modelopt({"model.layers.0.self_attn": FP8}, schema=2)}, "version 2; what is known"),
    ):
        with pytest.raises(InputError, match=words):
            skipped_layers(open_model_directory(model(tmp_path, **document)))


def test_vllm_leaves_them_out_unless_its_user_names_others(tmp_path, caplog, monkeypatch):
    path = str(model(tmp_path / "model", kv_cache_dtype_skip_layers=[1]))
    cache = SimpleNamespace(cache_dtype="fp8", kv_cache_dtype_skip_layers=[])
    config = SimpleNamespace(
        cache_config=cache, model_config=SimpleNamespace(model=path, revision=None),
        load_config=SimpleNamespace(load_format="auto"),
    )  # fmt: skip
    module = ModuleType("vllm.engine.arg_utils")
    module.EngineArgs = type("EngineArgs", (), {"create_engine_config": lambda self: config})
    watch_arguments(module)
    with caplog.at_level(logging.INFO, "vllm.fp8kv"):
        assert module.EngineArgs().create_engine_config() is config
        assert cache.kv_cache_dtype_skip_layers == ["1"]
        cache.kv_cache_dtype_skip_layers = ["0"]
        module.EngineArgs().create_engine_config()
        assert cache.kv_cache_dtype_skip_layers == ["0"]
        cache.cache_dtype, cache.kv_cache_dtype_skip_layers = "nvfp4", []
        module.EngineArgs().create_engine_config()
        assert cache.kv_cache_dtype_skip_layers == []
    start = "fp8kv: the checkpoint's config leaves layer 1 in 16 bits; "
    said = [record.getMessage() for record in caplog.records]
    assert said == [start + "so are they here", start + "the command line leaves 0 instead"]
    cache.cache_dtype = "auto"
    model(tmp_path / "model", **CONFIG | {"kv_cache_dtype_skip_layers": [7]})
    monkeypatch.setenv("FP8KV_REQUIRE_SCALES", "1")
    with pytest.raises(plugin.ScalesNotUsedError, match="cannot leave layers in 16 bits as the .* is .7.;"):
        module.EngineArgs().create_engine_config()
