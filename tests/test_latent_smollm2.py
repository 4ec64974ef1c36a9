"""The benchmark's latent model is its source: the same function, with a DeepSeek's cache."""

import sys

import latent_smollm2 as script
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3ForCausalLM

TOKENS = torch.arange(2 * 60).reshape(2, 60) % 128


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
