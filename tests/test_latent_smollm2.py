"""The benchmark's latent model is its source: the same function, with a DeepSeek's cache."""

import sys

import latent_smollm2 as script
import pytest
import torch
from families import save_model, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3ForCausalLM

from calib.errors import InputError
from calib.models.sources import find_model

# three KV heads as in SmolLM2
SHAPE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
TOKENS = torch.arange(2 * 60).reshape(2, 60) % 128


def tiny_llama():
    """A Llama whose random queries are long enough to prefer some tokens."""
    llama = tiny_model("llama", **SHAPE)
    for layer in llama.model.layers:
        layer.self_attn.q_proj.weight.data *= 30
    return llama


def run(monkeypatch, out, *arguments):
    """The script with a shorter text: 2,000 tokens take half a minute."""
    monkeypatch.setattr(script, "LENGTHS", (64, 256))
    monkeypatch.setattr(sys, "argv", ["latent_smollm2.py", str(out), *map(str, arguments)])
    script.main()


@torch.no_grad()
def test_smollm2_is_written_whole_and_computes_the_same(smollm2_directory, monkeypatch, tmp_path, capsys):
    run(monkeypatch, tmp_path / "latent")
    assert "greedy tokens agree" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "latent").eval()
    source = AutoModelForCausalLM.from_pretrained(smollm2_directory, dtype=torch.float32).eval()
    assert isinstance(model, DeepseekV3ForCausalLM)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    expected = source(TOKENS).logits
    assert (model(TOKENS).logits - expected).abs().max() <= script.BOUND * expected.abs().max()
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


def test_other_models_are_refused(tmp_path):
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    source = save_model(tiny_model("llama", rope_parameters=linear), tmp_path / "source")
    with pytest.raises(InputError, match="fewer than 4 KV heads"):
        script.write_latent_model(find_model(str(source)), tmp_path / "latent")
    assert not (tmp_path / "latent").exists()
    llama = tiny_llama()
    llama.model.layers[1].input_layernorm.weight.data[3] = 0
    with pytest.raises(InputError, match=r"layers\.1\.input_layernorm\.weight has zeros"):
        script.latent_weights(llama.state_dict(), llama.config)
