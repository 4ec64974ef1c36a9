"""The figures on a real model, recomputed with plain transformers and an own FP8 rounding."""

import numpy as np
import torch
from evaluations import plain_inputs
from fake_quant import fake_quantized

from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.summarize import summarize
from calib.recipe import load_recipe


@torch.inference_mode()
def test_kl_and_agreement_are_those_of_plain_transformers():
    names = ["none", "e5m2", "tensor", "attn_head", "channel+k_center"]
    choices = {"data.dataset": "builtin:python-docs", "device": "cpu", "evaluation.variants": names}
    suite = Suite(4, 2, 128, 0, 0, (), (), 0)
    evaluation = evaluate("builtin:smollm2", load_recipe(None, choices), suite=suite)
    report = summarize(evaluation).to_json()
    model, documents = plain_inputs(evaluation)
    reference = [model(ids, use_cache=False).logits[0].double().log_softmax(-1) for ids in documents]
    for name in ("e5m2", "channel+k_center"):
        kl, agreed = [], 0
        for ids, p in zip(documents, reference, strict=True):
            with fake_quantized(model, evaluation.measured[name].variant.scales):
                q = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
            kl.append((p.exp() * (p - q)).sum(-1))
            agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        row = report["variants"][name]
        np.testing.assert_allclose(row["kl"]["value"], torch.cat(kl).mean().item(), rtol=0.02)
        assert row["top1_count"] == agreed

    # what is known of this model
    kl = {name: row["kl"]["value"] for name, row in report["variants"].items()}
    assert kl["e5m2"] > 2 * kl["tensor"]
    assert kl["channel+k_center"] < kl["attn_head"]
    assert all(0.001 < kl[name] < 0.05 for name in ("none", "tensor", "attn_head"))
    assert report["noise_floor"] < 1e-3
