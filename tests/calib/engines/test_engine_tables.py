"""The tables of what engines' classes do: what became of scales, and how tables are compared."""

from types import SimpleNamespace

import pytest
from engine_cases import NAMINGS, QUANTIZATIONS, Fixture, fixtures, wanted
from engine_fates import NOT_FP8, fate
from engine_fixtures import make_scales
from engine_tables import differences, flat, groups, modules, named, recorded, together

from calib.engines.catalogue import load_catalogue
from calib.formats import export

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


def test_the_configs_are_those_that_we_write(checkpoint):
    kinds = {"compressed-tensors": "vllm", "compressed-tensors attn_head": "vllm", "modelopt": "modelopt"}
    for name, format_name in kinds.items():
        strategy = name.partition(" ")[2] or "tensor"
        written = export(make_scales(strategy), checkpoint, format_name)
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
