"""Whether classes of drafters (EAGLE), and of layers that draft tokens (MTP), load the catalogue's `drafts`.

draft_classes.py vllm|sglang   prints a line for each class and kind of config; ends with 1 if one fails

With the names in `draft_crashes` the class must not start. The class of a model with such a layer must load
its own scales beside them.
"""

import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine_cases import QUANTIZATIONS, Fixture, Quantization, fixtures, scale_tensors, wanted, write
from engine_fates import fate, reason

from calib.engines.catalogue import find_engine

# the first layer after the model's own: transformers finds the weights of MTP layers by these numbers
LAYERS = {"DeepseekV3ForCausalLM": 61, "Glm4MoeForCausalLM": 46, "Glm4MoeLiteForCausalLM": 47}
KINDS = (
    "compressed-tensors",
    "compressed-tensors attn_head",
    "modelopt",
    "modelopt transformers",
    "fp8",
    "quark",
)


DRAFTERS = {  # what vLLM calls how they draft, and their attention module
    "Eagle3LlamaForCausalLM": ("eagle3", "midlayer.self_attn"),
    "EagleLlamaForCausalLM": ("eagle", "layers.0.self_attn"),
    "LlamaForCausalLMEagle": ("eagle", "layers.0.self_attn"),
    "LlamaForCausalLMEagle3": ("eagle3", "midlayer.self_attn"),
}


def build_draft(
    name: str, engine: Any, directory: Path, drafter: dict[str, Any] | None = None, **options: Any
) -> Any:
    """The draft's class, as the engine's loader makes it."""
    if name == "sglang":
        from sglang_classes import DRAFTS

        DRAFTS["are asked"] = True  # until its scales were held
        return engine.build(directory)
    import vllm_classes as vllm

    speculative = {"num_speculative_tokens": 1, **(drafter or {"method": "mtp"})}
    config = vllm.config_of(directory, speculative_config=speculative, **options)
    draft = config.speculative_config.draft_model_config
    with vllm.set_current_vllm_config(config), vllm.set_default_torch_dtype(torch.bfloat16):
        return vllm.Built(config, vllm.initialize_model(config, model_config=draft))


def fixture_of(architecture: str) -> tuple[Fixture, str]:
    """A model with as many layers as published ones, where that matters, and the draft's attention module."""
    (fixture,) = (each for each in fixtures([architecture]) if each.name == architecture)
    count = LAYERS.get(architecture)
    if count is None:
        return fixture, "mtp.layers.0.self_attn"
    config = {**fixture.config, "num_hidden_layers": count, "num_nextn_predict_layers": 1}
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = ["dense"] + ["sparse"] * (count - 1)
    modules = tuple(f"model.layers.{i}.self_attn" for i in range(count))
    return replace(fixture, config=config, modules=modules), f"model.layers.{count}.self_attn"


def check_drafter(name: str, engine: Any, architecture: str, kind: str, naming: str) -> tuple[str, str]:
    """What becomes of the scales of a drafter of Llama."""
    quantization, (method, module) = QUANTIZATIONS[kind], DRAFTERS[architecture]
    whole, _ = fixture_of("LlamaForCausalLM")
    changes = {"architectures": [architecture], "num_hidden_layers": 1}
    config = {**whole.config, **changes, "draft_vocab_size": whole.config["vocab_size"]}
    drafter = replace(whole, config=config, modules=(module,))
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        directory, place = write(drafter, quantization, Path(one)), write(whole, quantization, Path(two))
        facts = {"method": method, "model": str(directory)}
        model = build_draft(name, engine, directory if name == "sglang" else place, facts)
        heads = engine.heads(model) if quantization.per_head else 0
        held = engine.hold(model, scale_tensors(drafter, naming, heads))
        return fate(wanted(drafter, naming, heads or 1), held), "apart"


def check(name: str, engine: Any, architecture: str, kind: str, naming: str) -> tuple[str, str]:
    """What becomes of the draft's scales, and of the model's beside them."""
    quantization: Quantization = QUANTIZATIONS[kind]
    whole, module = fixture_of(architecture)
    draft = replace(whole, modules=(module,))
    with tempfile.TemporaryDirectory() as scratch:
        directory = write(whole, quantization, Path(scratch))
        model = build_draft(name, engine, directory, **quantization.options)
        heads = engine.heads(model) if quantization.per_head else 0
        tensors = scale_tensors(draft, naming, heads)
        of_draft = fate(wanted(draft, naming, heads or 1), engine.hold(model, tensors))
        if name == "sglang":
            from sglang_classes import DRAFTS

            DRAFTS["are asked"] = False
        model = engine.build(directory, **quantization.options)
        of_model = set()
        for own in ("{module}.{x}_proj.{x}_scale", "{module}.{x}_scale", "{module}.attn.{x}_scale"):
            with suppress(Exception):
                held = engine.hold(model, scale_tensors(whole, own, heads) + tensors)
                of_model.add(fate(wanted(whole, own, heads or 1), held))
    return of_draft, "loaded" if "loaded" in of_model else " ".join(sorted(of_model))


def of_latents(engine: Any, architecture: str) -> tuple[str, ...]:
    """The further kinds of config for a model that caches latents (MLA)."""
    is_mla = architecture not in DRAFTERS and fixture_of(architecture)[0].is_mla
    return engine.of_latents if is_mla else ()


def main(name: str) -> int:
    if name == "sglang":
        from sglang_classes import SGLang as Kind
    else:
        from vllm_classes import VLLM as Kind
    engine = Kind()
    rules, failed = find_engine(name, engine.version), 0
    cases = [
        (architecture, kind, naming)
        for architecture, names in rules.drafts.items()
        for kind in KINDS
        if kind in engine.quantizations or kind in of_latents(engine, architecture)
        for naming in (
            *names.get(kind.removesuffix(" transformers"), names.get("all", ())),
            *rules.draft_crashes.get(architecture, ()),
        )
    ]
    for architecture, kind, naming in cases:
        try:
            way = check_drafter if architecture in DRAFTERS else check
            found = way(name, engine, architecture, kind, naming)
        except Exception as error:  # noqa: BLE001 (whatever the engine raises)
            found = reason("crash", error), ""
        crashes = naming in rules.draft_crashes.get(architecture, ())
        failed += not found[0].startswith("crash" if crashes else "loaded")
        print(f"{rules.title} {architecture}, {kind}, {naming}: draft {found[0]}; model {found[1]}")
    return 1 if failed else 0


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main(sys.argv[1]))
