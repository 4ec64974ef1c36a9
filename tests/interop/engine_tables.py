"""The tables in calib/verify/architectures/: written from what an engine's classes did, compared.

An engine's script calls `main`; its options:
  [ARCHITECTURE ...]   these alone; prints what they do and writes nothing
  --check              compare with the table, exit 1 and a line for each difference
"""

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

from engine_cases import Engine, collect, fixtures

TABLES = Path(__file__).parents[2] / "calib/verify/architectures"

Results = dict[str, dict[str, str]]  # quantization -> naming -> fate
Flat = dict[tuple[str, ...], str]


def main(engine: Engine) -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("architectures", nargs="*")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    found = run(engine, options.architectures)
    if options.check:
        compare(engine, found, whole=not options.architectures)
    elif not options.architectures:
        write(engine, found)
    else:
        print(json.dumps(found, indent=2))


def run(engine: Engine, names: list[str]) -> dict[str, Results | str]:
    """What every class does; a line for each."""
    found = {}
    for fixture in fixtures(names):
        start = time.perf_counter()
        result = found[fixture.architecture] = collect(engine, fixture)
        seen = result if isinstance(result, str) else summary(result)
        print(f"{fixture.architecture} ({time.perf_counter() - start:.1f} s): {seen}", flush=True)
    return found


def summary(results: Results) -> str:
    """How often each fate occurred."""
    fates = [fate.partition(":")[0] for named in results.values() for fate in named.values()]
    return ", ".join(f"{fates.count(fate)} {fate}" for fate in sorted({*fates}))


# ---- the table ----


def table_file(engine: Engine) -> Path:
    """Where the table of an engine is."""
    return TABLES / f"{engine.name.lower()}.json"


def write(engine: Engine, found: dict[str, Results | str]) -> None:
    """Write the table; architectures that do the same are one group."""
    document = {
        "engine": engine.name,
        "version": engine.version,
        "ran": datetime.date.today().isoformat(),
        "groups": groups({name: r for name, r in found.items() if not isinstance(r, str)}),
        "not_built": {name: r for name, r in sorted(found.items()) if isinstance(r, str)},
    }
    file = table_file(engine)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")
    built = len(found) - len(document["not_built"])
    print(f"{file.name}: {built} architectures in {len(document['groups'])} groups")


def groups(built: dict[str, Results]) -> list[dict[str, Any]]:
    """Equal results together, the largest group first."""
    together: dict[str, list[str]] = {}
    for name in sorted(built):
        together.setdefault(json.dumps(built[name], sort_keys=True), []).append(name)
    ranked = sorted(together.items(), key=lambda item: (-len(item[1]), item[1]))
    return [{"architectures": names, "results": json.loads(key)} for key, names in ranked]


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


def recorded(document: dict[str, Any]) -> dict[str, Results | str]:
    """What a table says, by architecture."""
    found: dict[str, Results | str] = dict(document["not_built"])
    for group in document["groups"]:
        found |= dict.fromkeys(group["architectures"], group["results"])
    return found


def differences(before: Flat, now: Flat) -> list[str]:
    """A line for every case that is not as it was."""
    return [
        f"{' | '.join(case)}: recorded {before.get(case, 'nothing')}, "
        f"now {now.get(case, 'nothing')}"
        for case in sorted({*before, *now})
        if before.get(case) != now.get(case)
    ]


def compare(engine: Engine, found: dict[str, Results | str], *, whole: bool) -> None:
    """Exit 1 unless the table says what was found."""
    document = json.loads(table_file(engine).read_text())
    before = recorded(document)
    if not whole:
        before = {name: before[name] for name in found if name in before}
    wrong = differences(flat(before), flat(found))
    if document["version"] != engine.version:
        wrong.append(f"recorded with {engine.name} {document['version']}, now {engine.version}")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    if wrong:
        sys.exit(f"FAILED: {len(wrong)} differences; `make engines` writes the table again")
    print(f"OK: {len(found)} architectures do in {engine.name} what the table says")
