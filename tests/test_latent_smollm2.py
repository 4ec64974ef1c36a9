"""The benchmark's latent model is its source: the same function, with a DeepSeek's cache."""

import sys

import latent_smollm2 as script
import pytest
import torch
from families import save_model, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from calib.errors import InputError
from calib.models.sources import find_model

# three KV heads as in SmolLM2; an eps that shows, where the second norm divides again
SHAPE = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "rms_norm_eps": 0.01,
}
TOKENS = torch.arange(2 * 60).reshape(2, 60) % 128
# of the largest value: a hundred roundings of float32, which has 6e-8
NEAR = 1e-5


def tiny_llama():
    """A Llama whose random queries are long enough to prefer some tokens."""
    llama = tiny_model("llama", **SHAPE)
    for layer in llama.model.layers:
        layer.self_attn.q_proj.weight.data *= 30
    return llama


def latent_of(llama):
    """The latent model of a Llama, in memory."""
    model = DeepseekV3ForCausalLM(script.latent_config(llama.config)).eval()
    model.load_state_dict(script.latent_weights(llama.state_dict(), llama.config))
    return model


@torch.no_grad()
def distance(model, other):
    expected = model(TOKENS).logits
    return far(other(TOKENS).logits, expected)


def far(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


def run(monkeypatch, out, *arguments):
    """The script with a shorter text: 2,000 tokens take half a minute."""
    monkeypatch.setattr(script, "LENGTHS", (64, 256))
    monkeypatch.setattr(sys, "argv", ["latent_smollm2.py", str(out), *map(str, arguments)])
    script.main()


def test_smollm2_is_written_whole_and_computes_the_same(smollm2_directory, monkeypatch, tmp_path, capsys):
    run(monkeypatch, tmp_path / "latent")
    assert "greedy tokens agree" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "latent").eval()
    source = AutoModelForCausalLM.from_pretrained(smollm2_directory, dtype=torch.float32).eval()
    assert isinstance(model, DeepseekV3ForCausalLM)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert distance(source, model) <= script.BOUND
    frequencies = source.model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies.repeat(3))
    assert model.generation_config.to_dict() == source.generation_config.to_dict()
    chat = [{"role": "user", "content": "Hello"}]
    ours, theirs = map(AutoTokenizer.from_pretrained, (tmp_path / "latent", smollm2_directory))
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)


def test_another_function_is_not_left_behind_and_what_is_there_not_replaced(monkeypatch, tmp_path, capsys):
    source = save_model(tiny_llama(), tmp_path / "source")
    text = " ".join(f"w{3 + 7 * i % 120}" for i in range(200))
    monkeypatch.setattr(script.pydoc_data.topics, "topics", {"words that its tokenizer knows": text})
    monkeypatch.setattr(script, "key_rows", lambda k, _: k)
    with pytest.raises(SystemExit, match="not the same function"):
        run(monkeypatch, tmp_path / "latent", "--model", source)
    assert [*tmp_path.iterdir()] == [source]
    with pytest.raises(SystemExit):
        run(monkeypatch, source)
    assert "exists; give another directory" in capsys.readouterr().err


@torch.no_grad()
def test_a_llama_with_a_large_eps_is_the_same_with_its_normalised_input_and_all_keys_in_the_cache():
    llama = tiny_llama()
    assert distance(llama, latent_of(llama)) <= NEAR
    cache = latent_of(llama)(TOKENS).past_key_values
    expected = llama(TOKENS, output_hidden_states=True)
    for layer, hidden in zip(cache.layers, expected.hidden_states, strict=False):
        normalised = DeepseekV3RMSNorm(hidden.shape[-1], SHAPE["rms_norm_eps"])(hidden)
        assert far(layer.keys[:, 0], normalised) <= NEAR
    for layer, its in zip(cache.layers, expected.past_key_values.layers, strict=True):
        halves = its.keys.unflatten(-1, (2, -1)).permute(0, 2, 3, 1, 4)
        assert far(layer.values[:, 0], halves.flatten(2)) <= NEAR


def test_other_models_are_refused(tmp_path):
    for number, options in enumerate(
        (
            {"num_attention_heads": 4, "num_key_value_heads": 4},
            {"attention_bias": True},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        )
    ):
        source = save_model(tiny_model("llama", **options), tmp_path / str(number))
        with pytest.raises(InputError, match="fewer than 4 KV heads"):
            script.write_latent_model(find_model(str(source)), tmp_path / "latent")
        assert not (tmp_path / "latent").exists()
    llama = tiny_llama()
    llama.model.layers[1].input_layernorm.weight.data[3] = 0
    with pytest.raises(InputError, match=r"layers\.1\.input_layernorm\.weight has zeros"):
        latent_of(llama)
