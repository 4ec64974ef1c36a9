"""Measure Q, K and V of a small model of each family with realistic weights, for check_queries.py.

write_queries.py OUT [ARCHITECTURE ...]   writes OUT/<architecture>, a checkpoint in float32 with
                                          the measured amax of each head in measured.json, or why
                                          there is none
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from families import save_model
from realistic import give_realistic_weights
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from calib.capture.capabilities import RUN
from calib.capture.loop import calibrate
from calib.data import make_batches
from calib.errors import Fp8kvError
from calib.recipe import load_recipe

ARCHITECTURES = Path(__file__).parents[2] / "tools/engine_classes/architectures"
TOKENS = [1, *torch.randint(3, 110, (47,), generator=torch.Generator().manual_seed(5)).tolist()]
RECIPE = load_recipe(None, {"device": "cpu", "targets": "qkv"})


# the classes whose vision towers vLLM names as transformers does
SAME_TOWERS = ("AriaForConditionalGeneration", "InternVLForConditionalGeneration")


def make_model(architecture: str) -> torch.nn.Module:
    """A model of the family, from the config that the engines' classes are built from."""
    fields = json.loads((ARCHITECTURES / f"{architecture}.json").read_text())
    del fields["fp8kv_attention"]
    torch.manual_seed(0)
    if fields.get("multi_query"):
        fields["num_key_value_heads"] = 1
    text = fields.get("text_config", fields)
    if "intermediate_size_mlp" in text:
        text |= {"intermediate_size_mlp": 512, "num_experts_per_tok": 1}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    seeing = "ForConditionalGeneration" in architecture
    kind = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    return give_realistic_weights(kind.from_config(config, dtype=torch.float32)).eval()


def measured(model: torch.nn.Module) -> dict[str, dict[str, list[float]]]:
    """The largest magnitude of each head of K, V and Q, by layer."""
    stats = calibrate(model, make_batches([TOKENS], 1, pad_id=0), RECIPE)
    return {
        str(layer.layer_idx): {letter: getattr(layer, letter).amax.amax(-1).tolist() for letter in "kvq"}
        for layer in stats.layers.values()
    }


def give_vllms_names(file: Path) -> None:
    """Name the weights of vision towers as vLLM 0.32 does, which transformers no longer does."""
    weights = load_file(file)
    tower = "vision_tower."
    if not any(tower + "embeddings" in name for name in weights):
        return
    renamed = {name.replace(tower, f"{tower}vision_model."): weight for name, weight in weights.items()}
    save_file(renamed, file, {"format": "pt"})


def main() -> None:
    """Write them all."""
    out = Path(sys.argv[1])
    names = sys.argv[2:] or sorted(RUN)
    for name in names:
        home = out / name
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        try:
            with torch.no_grad():
                model = make_model(name)
                document = {"tokens": TOKENS, "layers": measured(model)}
            save_model(model, home)
            if name not in SAME_TOWERS:
                give_vllms_names(home / "model.safetensors")
        except Fp8kvError as error:
            document = {"refused": str(error)}
        except Exception as error:  # noqa: BLE001 (a config that transformers does not build)
            document = {"not built": f"{type(error).__name__}: {error}"}
        (home / "measured.json").write_text(json.dumps(document))
        print(name, document.get("refused") or document.get("not built") or "written", flush=True)


if __name__ == "__main__":
    main()
