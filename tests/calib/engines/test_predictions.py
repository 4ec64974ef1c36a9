"""What is predicted of hand-made directories and of every class in the tables, as `make interop` asks."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import fp8kv
from engine_cases import NAMINGS, QUANTIZATIONS, Fixture, fixtures, wanted
from engine_fates import NOT_FP8, fate, reason
from engine_fixtures import make_scales
from engine_tables import differences, flat, groups, modules, named, recorded, together
from scale_directories import COMPRESSED, lines_of, model, simulated

from calib.engines.catalogue import load_catalogue
from calib.engines.model_classes import TRANSFORMERS
from calib.engines.simulate_loading import simulate
from calib.files.config import head_counts, text_config
from calib.files.model_directory import ModelDirectory
from calib.files.names import parse_scale_name
from calib.files.scale_files import ScaleTensor
from calib.formats import export

sys.path.append(str(Path(__file__).parents[2] / "interop"))
from scale_cases import CASES, LAYERS, write_case


def words(simulation):
    """As the table of cases says it."""
    if simulation.refused:
        return "refused"
    loaded = [o.letter for o in simulation.outcomes if o.status == "loaded"]
    everywhere = [letter for letter in "kvq" if loaded.count(letter) == LAYERS]
    somewhere = [letter for letter in "kvq" if 0 < loaded.count(letter) < LAYERS]
    return " ".join(everywhere or somewhere) + (f" in 1 of {LAYERS}" if somewhere else "")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_vllm_is_predicted(case, tmp_path):
    assert words(simulated(write_case(case, tmp_path / "model"), "vllm")) == case.expected


def directory(fixture, quantization, naming):
    """The fixture's checkpoint with a scale for each module, under one name."""
    config = dict(fixture.config)
    if quantization.config:
        config["quantization_config"] = quantization.config
    parts = [config, config.get("thinker_config") or {}]
    parts = [part.get("text_config") or part.get("llm_config") or part for part in parts]
    keys = ("num_key_value_heads", "num_attention_heads", "n_head")
    heads = next(part[key] for part in parts for key in keys if part.get(key))
    values = (0.5,) * (heads if quantization.per_head else 1)
    patterns = NAMINGS[:2] if naming == "both" else (naming,)
    names = sorted({p.format(module=m, x=x) for p in patterns for m in fixture.modules for x in "kv"})
    tensors = [ScaleTensor(n, parse_scale_name(n), "m", "F32", (len(values),), values) for n in names]
    made = ModelDirectory(Path(), config, {"m": {}})
    scales = {"tensors": tensors, "unlisted": [], "offsets": [], "json": None}  # what would be read of files
    vars(made).update(scales, modelopt=quantization.document, modules={*fixture.modules})
    return made


def word(simulation):
    if simulation.refused:
        return "refused"
    if any(outcome.status == "unknown" for outcome in simulation.outcomes):
        return "unknown"
    return "loaded" if simulation.is_good else simulation.fate


def results(classes, name):
    """What is to be predicted: of latents also what loads in the backend for transformers' code."""
    of_class = classes.results.get(name, {})
    for kind, fates in of_class.items():
        others = of_class.get(f"{kind}{TRANSFORMERS}", {}) if name in classes.latent else {}
        if not kind.endswith(TRANSFORMERS):
            yield kind, fates | {n: fate for n, fate in others.items() if fate == "loaded"}


@pytest.mark.parametrize("name", [name for name, engine in load_catalogue().items() if engine.classes])
def test_every_architecture_config_and_name(name):
    rules = load_catalogue()[name]
    wrong, cases = [], 0
    for fixture in fixtures([]):
        is_counted = head_counts(text_config(fixture.config), "k")
        for kind, fates in results(rules.classes, fixture.architecture):
            for naming, known in fates.items():
                expected = known.partition(":")[0].replace("crash", "refused")
                if kind.endswith("attn_head") and expected in ("loaded", "partly") and not is_counted:
                    expected = "unknown"  # heads of an unknown number
                found = word(simulate(directory(fixture, QUANTIZATIONS[kind], naming), rules))
                cases += 1
                if found != expected:
                    wrong.append((fixture.name, kind, naming, known, found))
    assert wrong == []
    assert cases > 3000


OLD, FP8 = "0.5.9", {"quant_method": "fp8"}


def statuses(directory, engine="sglang", version=None):
    found = simulated(directory, engine, version)
    return found.refused or {outcome.status for outcome in found.outcomes if outcome.letter != "q"}


def test_what_sglang_reads_and_that_it_refuses_groups_without_weights(tmp_path):
    def of(version=None, **options):
        return statuses(model(tmp_path, **options), version=version)

    # a scheme that it does not know is ignored
    for changes in ({"strategy": "attn_head"}, {"type": "int"}, {"dynamic": True}, {"symmetric": False}):
        scheme = COMPRESSED["kv_cache_scheme"] | changes
        assert of(config=COMPRESSED | {"kv_cache_scheme": scheme}) == {"default"}, changes
    assert (of(), of(OLD)) == ({"loaded"}, {"default"})
    assert of(k=(0.0, 0.0), v=(0.0, 0.0), config=FP8) == {"default"}  # zeros of both are as none
    assert of(k=(0.5, 0.5), v=(0.0, 0.0), config=FP8) == {"loaded"}
    assert "K scale of 0" in of(k=(0.0, 0.0), v=(0.5, 0.5), config=FP8)
    # classes do not matter without scales; to older versions Llama alone is known
    assert of(k=None, v=None, architectures=["Qwen3ForCausalLM"]) == {"default"}
    assert of(OLD, config=FP8) == {"loaded"}
    assert of(OLD, config=FP8, architectures=["Gemma3ForCausalLM"]) == {"unknown"}
    group = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {}}
    directory = model(tmp_path, config=COMPRESSED | {"config_groups": {"attention": group}})
    assert "'attention' without weights" in statuses(directory)
    assert statuses(directory, "vllm") == {"loaded"}
    done = fp8kv("verify", directory, "--engine", "sglang")
    assert done.exit_code == 1
    assert "write it again with fp8kv convert --to vllm" in lines_of(done)


def test_the_table_says_why_nothing_arrives_in_sglang(tmp_path):
    for family, shown, why in (
        ("Qwen3", "no place", "the attention layers of the model's class have no place"),
        ("Qwen2", "dropped", "the model's class drops it"),
        ("Granite", "crashes", "the model's class does not start with 'model.layers.0.self_attn"),
    ):
        architecture = f"{family}ForCausalLM"
        done = fp8kv("verify", model(tmp_path, architectures=[architecture]), "--engine", "sglang")
        assert done.exit_code == 1
        assert all(words in lines_of(done) for words in (f"│ {shown} │ {shown} │", why, architecture))


def test_sglang_reads_quark_and_mixed_precision_otherwise_than_vllm(tmp_path):
    """What differs; `make interop` compares these with SGLang's own config classes."""

    def of_case(name):
        return write_case(next(case for case in CASES if case.name == name), tmp_path / name)

    for name, expected in (
        ("quark, attention left out", {"loaded"}),
        ("mixed precision", {"loaded"}),
        ("mixed precision, FP8 layers", {"default"}),
        ("mixed precision, no cache", {"unknown"}),
        ("mixed precision, word for the cache", {"loaded"}),
    ):
        assert statuses(of_case(name)) == expected, name
    directory = of_case("mixed precision, no layers")
    assert statuses(directory) == {"default"}
    assert "no 'quantized_layers'" in statuses(directory, "vllm")
    assert "has no such entry" in statuses(of_case("quark, kv_cache_group by pattern"))


def test_latents_have_no_place_under_mixed_precision_in_vllm(tmp_path):
    case = next(case for case in CASES if case.name == "mixed precision")
    directory = model(tmp_path, config=case.config, architectures=["DeepseekV3ForCausalLM"], kv_lora_rank=8)
    assert statuses(directory, "vllm") == {"default"}
    assert "layers that cache latents" in simulated(directory, "vllm").ignored[0][1]


LLAMA = Fixture("Llama", {}, tuple(f"model.layers.{i}.self_attn" for i in (0, 1, 10)))
OWN = wanted(LLAMA, NAMINGS[0])
ONES = ((1.0,), (1.0,))


def test_the_fate_of_scales():
    for held, expected in (
        (OWN, "loaded"),
        ([OWN[1], OWN[0], OWN[2]], "partly: 1 of 3 loaded, 2 of 3 with another layer's scales"),
        ([(v, k) for k, v in OWN], "partly: all with K and V crossed"),
        ([(k, (1.0,)) for k, _ in OWN], "partly: all with K alone"),
        ([((0.5,), (0.5,)), *OWN[1:]], "partly: 2 of 3 loaded, 1 of 3 with a wrong value"),
        ([ONES] * 3, "dropped"),
        ([ONES, None, None], "dropped"),
        ([None] * 3, "no place"),
        ([None, *OWN[1:]], "partly: 2 of 3 loaded, 1 of 3 without a place"),
        ([NOT_FP8] * 3, "dropped: the cache keeps 16 bits"),
        (OWN[:2], "partly: 2 attention layers for 3 pairs of scales"),
    ):
        # in the order of layers, not of names: 10 comes after 2
        assert fate(OWN, {f"layers.{2 * i}.attn": pair for i, pair in enumerate(held)}) == expected
    assert reason("crash", ValueError("a\nb. c")) == "crash: ValueError: a b"
    assert reason("crash", ValueError("word " * 60)).endswith("word word ...")
    assert reason("crash", ValueError("word " * 10 + "end; " + "more " * 60)).endswith("word end")


def test_the_configs_are_those_that_we_write(checkpoint):
    kinds = {"compressed-tensors": "vllm", "compressed-tensors attn_head": "vllm", "modelopt": "modelopt"}
    for name, format_name in kinds.items():
        written = export(make_scales(name.partition(" ")[2] or "tensor"), checkpoint, format_name)
        assert written.config["quantization_config"] == QUANTIZATIONS[name].config
        assert written.documents.get("hf_quant_config.json") == QUANTIZATIONS[name].document


def test_equal_architectures_are_one_group_and_differences_a_line():
    first, second = {"none": {"a": "loaded"}}, {"none": {"a": "dropped"}}
    found = {"A": first, "B": second, "C": dict(first)}
    assert [group["architectures"] for group in groups(found)] == [["A", "C"], ["B"]]
    known = SimpleNamespace(results=found, not_built={"D": "why"})
    assert differences(flat(recorded(known)), flat({**found, "D": "why"})) == []
    assert differences(flat(found), flat({"A": second, "B": second})) == [
        "A | none | a: recorded loaded, now dropped",
        "C | none | a: recorded loaded, now nothing",
    ]
    # a class with two configs does what it does with both
    both = {"none": {"a": "partly: loaded, or by the config dropped"}}
    assert (together(first, first), together(first, second)) == (first, both)
    assert together("why", first) == together(first, "why") == "why"


@pytest.mark.parametrize("name", [name for name, engine in load_catalogue().items() if engine.classes])
def test_tables_are_about_the_small_configs(name):
    classes = load_catalogue()[name].classes
    table = recorded(classes)
    known = [fixture for fixture in fixtures([]) if fixture.architecture in classes.results]
    others = [other for fixture in known for other in fixture.spellings()]
    ran = {*named(classes.modules, table)}
    assert {*named(modules(known), table)} <= ran <= {*named(modules(known + others), table)}
    assert {*table} == {fixture.architecture for fixture in fixtures([])}
    fates = {case.partition(":")[0] for case in flat(table).values()}
    assert fates <= {"loaded", "dropped", "no place", "crash", "refused", "partly", "no"}
