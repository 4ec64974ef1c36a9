"""Samples written by the model or drawn at random: reproducible, and nothing but what was asked."""

import pytest
import torch
from transformers import GenerationConfig

from calib.data.generated import sample_at_random, sample_from_model
from calib.errors import InputError
from calib.recipe import DataRecipe

BOS, EOS = 0, 1


def recipe_of(**settings):
    return DataRecipe(**({"samples": 40, "seq_len": 64, "seed": 3, "batch_size": 16} | settings))


def test_self_samples_start_at_bos_and_end_at_eos_or_seq_len_and_depend_on_the_seed(tokenizer, tiny_llama):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    samples = sample_from_model(recipe_of(), tokenizer, tiny_llama)
    assert torch.equal(torch.rand(3), expected)  # the random state is left alone
    assert len(samples) == 40
    for sample in samples:
        assert sample[0] == BOS
        assert EOS not in sample[1:-1]
        assert len(sample) == 64 or sample[-1] == EOS
    assert min(map(len, samples)) < max(map(len, samples)) == 64
    assert sample_from_model(recipe_of(), tokenizer, tiny_llama) == samples
    assert sample_from_model(recipe_of(seed=4), tokenizer, tiny_llama) != samples


def test_self_draws_from_the_whole_distribution_of_the_model(tokenizer, tiny_llama):
    # nearly uniform whatever came before, but without ties, which top-k would keep
    tiny_llama.lm_head = torch.nn.Linear(16, 200)
    with torch.no_grad():
        tiny_llama.lm_head.weight.zero_()
        tiny_llama.lm_head.bias.copy_(torch.linspace(0, 1e-3, 200))
    samples = sample_from_model(recipe_of(samples=100), tokenizer, tiny_llama)
    counts = torch.bincount(torch.tensor([i for s in samples for i in s[1:]]), minlength=200)
    # about 25 draws of each of 200 ids are expected; 60 would be 7 sigma away
    assert 0 < counts.min() <= counts.max() < 60


def test_self_ignores_how_a_model_prefers_to_be_sampled(tokenizer, tiny_llama):
    few = recipe_of(samples=8, seq_len=32)
    plain = sample_from_model(few, tokenizer, tiny_llama)
    unchanged = tiny_llama.generation_config.to_dict()
    for name, value in {
        "top_k": 2, "top_p": 0.1, "min_p": 0.9, "typical_p": 0.1, "temperature": 0.1, "epsilon_cutoff": 0.05,
        "eta_cutoff": 0.99, "repetition_penalty": 5.0, "no_repeat_ngram_size": 1,
    }.items():  # fmt: skip
        tiny_llama.generation_config = GenerationConfig(**{**unchanged, name: value})
        assert sample_from_model(few, tokenizer, tiny_llama) == plain, name


def test_self_draws_again_when_the_model_ends_at_once_and_gives_up_where_it_always_does(
    tokenizer, tiny_llama
):
    # 190 of 200 ids end a sample
    tiny_llama.generation_config.eos_token_id = list(range(10, 200))
    samples = sample_from_model(recipe_of(samples=5), tokenizer, tiny_llama)
    assert len(samples) == 5
    assert all(1 < sample[1] < 10 or sample[1] == BOS for sample in samples)
    tiny_llama.generation_config.eos_token_id = list(range(200))
    with pytest.raises(InputError, match="ends every sample at its first token; use real text"):
        sample_from_model(recipe_of(), tokenizer, tiny_llama)


def test_self_without_bos_starts_at_eos_and_without_either_at_random(byte_tokenizer, tiny_llama):
    samples = sample_from_model(recipe_of(), byte_tokenizer(bos_token=None), tiny_llama)
    assert {sample[0] for sample in samples} == {EOS}
    # the EOS at the start does not end the sample
    assert min(map(len, samples)) > 1
    neither = byte_tokenizer(bos_token=None, eos_token=None)
    samples = sample_from_model(recipe_of(), neither, tiny_llama)
    assert len({s[0] for s in samples}) > 20
    assert sample_from_model(recipe_of(), neither, tiny_llama) == samples


def test_random_covers_the_whole_vocabulary_and_nothing_else(tokenizer, tiny_llama):
    samples = sample_at_random(recipe_of(samples=100), tokenizer, tiny_llama)
    assert [len(sample) for sample in samples] == [64] * 100
    # the tokenizer knows 261 ids, the model 200
    assert {i for sample in samples for i in sample} == set(range(200))
    assert sample_at_random(recipe_of(samples=100), tokenizer, tiny_llama) == samples
    assert sample_at_random(recipe_of(samples=100, seed=4), tokenizer, tiny_llama) != samples
    tiny_llama.config.vocab_size = 1000  # embeddings that no token has are left out
    samples = sample_at_random(recipe_of(samples=100), tokenizer, tiny_llama)
    assert {i for sample in samples for i in sample} == set(range(len(tokenizer)))
