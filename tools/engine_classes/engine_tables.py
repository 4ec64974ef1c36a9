"""The section `classes` of an engine's file: written from what its classes did, compared.

An engine's script calls `main`; its options:
  [ARCHITECTURE ...]   these alone; prints what they do and writes nothing
  --check              compare with the table, exit 1 and a line for each difference
"""

import argparse
import datetime
import json
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from engine_cases import NAMINGS, QUANTIZATIONS, Engine, Fixture, alike, build, collect, fixtures

sys.path.insert(0, str(Path(__file__).parents[2]))

from calib.engines.catalogue import FOLDER, find_engine
from calib.engines.model_classes import ALL, Classes
from calib.files.names import pattern_of

Results = dict[str, dict[str, str]]  # quantization -> naming -> fate
Flat = dict[tuple[str, ...], str]


def main(engine: Engine) -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("architectures", nargs="*")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    found, known = run(engine, options.architectures)
    if options.check:
        compare(engine, found, known, whole=not options.architectures)
    elif not options.architectures:
        write(engine, found, known)
    else:
        print(json.dumps(found | {"modules": modules(known)}, indent=2))


def run(engine: Engine, names: list[str]) -> tuple[dict[str, Results | str], list[Fixture]]:
    """What every class does, and the checkpoints it does so with; a line for each config."""
    found: dict[str, Results | str] = {}
    known: list[Fixture] = []
    for fixture in fixtures(names):
        start = time.perf_counter()
        result = collect(engine, fixture)
        seen = result if isinstance(result, str) else summary(result)
        if not isinstance(result, str):
            others = alike(engine, fixture, result)
            known += [fixture, *others]
            seen += "".join(f"; also {pattern_of(each.modules[0])}" for each in others)
        print(f"{fixture.name} ({time.perf_counter() - start:.1f} s): {seen}", flush=True)
        before = found.get(fixture.architecture, result)
        found[fixture.architecture] = together(before, result)
    return found, known


def together(one: Results | str, other: Results | str) -> Results | str:
    """What a class does whichever of two configs it has."""
    if isinstance(one, str) or isinstance(other, str):
        return one if isinstance(one, str) else other
    return {
        quantization: {
            naming: fate
            if fate == other[quantization][naming]
            else f"partly: {fate}, or by the config {other[quantization][naming]}"
            for naming, fate in fates.items()
        }
        for quantization, fates in one.items()
    }


def summary(results: Results) -> str:
    """How often each fate occurred."""
    fates = [fate.partition(":")[0] for named in results.values() for fate in named.values()]
    return ", ".join(f"{fates.count(fate)} {fate}" for fate in sorted({*fates}))


# ---- the section ----


def engine_file(engine: Engine) -> Path:
    """Return the file of the catalogue that holds for the engine's version."""
    name = engine.name.lower()
    return FOLDER / f"{name}-{find_engine(name, engine.version).since}.yaml"


def write(engine: Engine, found: dict[str, Results | str], known: list[Fixture]) -> None:
    """Write the section; architectures that do the same are one group."""
    built = {name: r for name, r in found.items() if not isinstance(r, str)}
    known = [fixture for fixture in known if fixture.architecture in built]
    latent = {each.architecture for each in known if caches_latents(engine, each)}
    section = {
        "version": engine.version,
        "ran": datetime.date.today().isoformat(),
        "names": Line(NAMINGS),
        "groups": groups(built),
        "modules": {name: Line(architectures) for name, architectures in modules(known).items()},
        "latent": Line(sorted(latent)),
        "not_built": {name: r for name, r in sorted(found.items()) if isinstance(r, str)},
    }
    write_section(engine_file(engine), section)
    print(f"{engine_file(engine).name}: {len(built)} architectures in {len(section['groups'])} groups")


class Line(list[str]):
    """A list that is written in one line, as far as it fits."""


class Dumper(yaml.SafeDumper):
    """Write YAML in which a `Line` is in flow style."""


Dumper.add_representer(
    Line, lambda dumper, line: dumper.represent_sequence("tag:yaml.org,2002:seq", line, flow_style=True)
)


def write_section(file: Path, section: dict[str, Any]) -> None:
    """Put the section `classes` at the end of a file, in the place of an older one."""
    head = file.read_text().partition("\nclasses:\n")[0].rstrip("\n")
    text = yaml.dump({"classes": section}, Dumper=Dumper, width=150, sort_keys=False)
    file.write_text(f"{head}\n{text}")


def caches_latents(engine: Engine, fixture: Fixture) -> bool:
    """Whether the engine's own class of it caches latents (MLA)."""
    kind = QUANTIZATIONS[engine.quantizations[0]]
    return fixture.is_mla and engine.caches_latents(build(engine, fixture, kind))


def groups(built: dict[str, Results]) -> list[dict[str, Any]]:
    """Equal results together, the largest group first."""
    together: dict[str, list[str]] = {}
    for name in sorted(built):
        together.setdefault(json.dumps(built[name], sort_keys=True), []).append(name)
    ranked = sorted(together.items(), key=lambda item: (-len(item[1]), item[1]))
    return [{"architectures": Line(names), "fates": short(json.loads(key))} for key, names in ranked]


def short(results: Results) -> dict[str, dict[str, str]]:
    """Write kinds of config that do the same together, and the most frequent fate once."""
    kinds: dict[str, list[str]] = {}
    for kind, fates in results.items():
        ((usual, _),) = Counter(map(fates.get, NAMINGS)).most_common(1)
        lines = {ALL: usual} | {n: fate for n, fate in fates.items() if n not in NAMINGS or fate != usual}
        kinds.setdefault(json.dumps(lines), []).append(kind)
    return {", ".join(names): json.loads(key) for key, names in kinds.items()}


def modules(known: list[Fixture]) -> dict[str, list[str]]:
    """The names of attention modules, and the architectures whose checkpoints have them."""
    found: dict[str, set[str]] = {}
    for fixture in known:
        for module in fixture.modules:
            found.setdefault(pattern_of(module), set()).add(fixture.architecture)
    return {name: sorted(found[name]) for name in sorted(found)}


def flat(found: dict[str, Results | str]) -> Flat:
    """One entry for every case."""
    cases: Flat = {}
    for name, results in found.items():
        if isinstance(results, str):
            cases[name, "built"] = f"no: {results}"
            continue
        for quantization, fates in results.items():
            cases |= {(name, quantization, naming): fate for naming, fate in fates.items()}
    return cases


def recorded(classes: Classes) -> dict[str, Results | str]:
    """What a table says, by architecture."""
    return classes.results | classes.not_built


def differences(before: Flat, now: Flat) -> list[str]:
    """A line for every case that is not as it was."""
    return [
        f"{' | '.join(case)}: recorded {before.get(case, 'nothing')}, now {now.get(case, 'nothing')}"
        for case in sorted({*before, *now})
        if before.get(case) != now.get(case)
    ]


def named(architectures: Mapping[str, Iterable[str]], of: Collection[str]) -> Flat:
    """One entry for every architecture and name of attention."""
    pairs = [(name, pattern) for pattern, names in architectures.items() for name in names]
    return {(name, "attention", pattern): "runs" for name, pattern in pairs if name in of}


def caching(latent: Iterable[str], of: Collection[str]) -> Flat:
    """One entry for every architecture that caches latents (MLA)."""
    return {(name, "cache"): "of latents" for name in latent if name in of}


def compare(engine: Engine, found: dict[str, Results | str], known: list[Fixture], *, whole: bool) -> None:
    """Exit 1 unless the table says what was found."""
    classes = find_engine(engine.name.lower(), engine.version).classes
    if classes is None:
        sys.exit(f"FAILED: {engine_file(engine).name} has no section `classes`; `make engines` writes it")
    before = recorded(classes)
    if not whole:
        before = {name: before[name] for name in found if name in before}
    wrong = differences(flat(before), flat(found))
    wrong += differences(named(classes.modules, found), named(modules(known), found))
    latent = [fixture.architecture for fixture in known if caches_latents(engine, fixture)]
    wrong += differences(caching(classes.latent, found), caching(latent, found))
    if classes.version != engine.version:
        wrong.append(f"recorded with {engine.name} {classes.version}, now {engine.version}")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    if wrong:
        sys.exit(f"FAILED: {len(wrong)} differences; `make engines` writes the table again")
    print(f"OK: {len(found)} architectures do in {engine.name} what the table says")
