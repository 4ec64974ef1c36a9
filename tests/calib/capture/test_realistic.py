"""Tiny models have what trained ones have, and what models made from a config lack."""

import pytest
import torch
from families import FAMILIES, LATENT, tiny_model
from realistic import SINK, TOKENS, is_norm, multiplies_by_one_plus, rows_of_keys

# one family of each way to make keys and norms
MADE = ("llama", "gemma2", "phi3", "gpt_neox", "falcon", "cohere2", "gpt_oss")
OPTIONS = {**{family: FAMILIES[family] for family in MADE}, "deepseek_v3": LATENT["deepseek_v3"]}


@pytest.mark.parametrize("family", OPTIONS)
def test_a_family_has_realistic_weights(family):
    model = tiny_model(family, **OPTIONS[family])
    for name, module in model.named_modules():
        if is_norm(module):
            weight = module.weight
            assert torch.equal(weight, weight.bfloat16().float()), name
            factor = weight.detach() + multiplies_by_one_plus(module)
            assert factor.max() == pytest.approx(60, rel=2**-7), name
            assert factor.min() >= 0.3 * (1 - 2**-8), name
            assert (factor.std() / factor.mean()) > 0.5, name
    embedding = model.get_input_embeddings().weight.detach().abs().amax(1)
    others = torch.cat([embedding[:SINK], embedding[SINK + 1 :]])
    assert embedding[SINK] >= 20 * others.max()
    check_outliers(model)


def check_outliers(model):
    """Measure the outputs of all layers that make K, norms of K not yet applied."""
    ratios = []
    for module in model.modules():
        keys, rows = rows_of_keys(module)
        if keys is not None:

            def measure(module, args, output, rows=rows):
                amax = output.flatten(0, -2)[:, list(rows)].abs().amax(0)
                ratios.append(float(amax.max() / amax.median()))

            keys.register_forward_hook(measure)
    with torch.inference_mode():
        model.get_decoder()(input_ids=TOKENS, use_cache=False)
    assert ratios
    assert all(50 <= ratio <= 500 for ratio in ratios), ratios
