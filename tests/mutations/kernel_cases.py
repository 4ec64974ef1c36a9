"""Which mistakes in the attention kernels each case of the tests notices, and which cases that takes.

kernel_cases.py --seed 1 --count 40

The mistakes are those of tests/runtime/test_mutations.py and a random sample. A case is taken if it kills a
mutant that those taken before it do not kill; what in the end kills nothing alone can go.
"""

import argparse
import os
import select
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # which is read when Triton is imported
sys.path.extend(str(Path(__file__).parents[2] / path) for path in ("", "tests/support", "tests/runtime"))

import torch
from checks import assert_attention
from kernel_grid import name_of, paired_cases
from kernel_setting import table_of_small_tiles
from mutants import copied, mutated
from mutate import apply, find_mutants, sample
from paged import Case
from test_mutations import CHECKS, MUTATIONS

ROOT = Path(__file__).parents[2]
FILES = ("attend", "decode", "extend")
SECONDS = 60  # for one case: a mutant may loop for ever


def main() -> None:
    """Print cases that kill what all of them kill, and what each of them kills alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="of random ones")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = {name_of(case): case for case in paired_cases()}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.environ["FP8KV_TUNING"] = str(table_of_small_tiles(directory))
        find = partial(killers, directory=directory)
        assert not find({}, ("kernel", "reference"), cases, most=1), "it fails without a mutant"
        kept: dict[str, Case] = {}
        wrong, doubtful = mutants(options.seed, options.count), []
        for mutant, where in wrong.items():
            # two of those taken so far; one more is taken where none of them notices
            found = find(*where, kept, most=2) or find(*where, cases, most=1)
            kept |= {name: cases[name] for name in found}
            doubtful += [mutant] * (len(found) == 1)
            print(f"{found or 'SURVIVED'}  {mutant}", flush=True)
        alone: dict[str, list[str]] = {name: [] for name in kept}
        for mutant in doubtful:
            found = find(*wrong[mutant], kept, most=2)
            if len(found) == 1:
                alone[found[0]].append(mutant)
    for name, only in alone.items():
        print(f"{name}: {len(only)} alone, such as {only[:3]}")


def mutants(seed: int, count: int) -> dict[str, tuple[dict[str, str], tuple[str, ...]]]:
    """Return by name the changed sources, and the implementations that ought to be wrong."""
    found = {}
    for name, (check, file, *replacements) in MUTATIONS.items():
        implementation = check.split()[-1]
        if CHECKS[check].func is assert_attention:
            found[name] = {file: mutated(file, *replacements)}, (implementation,)
    paths = [f"fp8kv_runtime/kernels/{name}.py" for name in FILES]
    random = [mutant for mutant in find_mutants(ROOT) if mutant.file in paths]
    for mutant in sample(random, count, seed):
        source = apply((ROOT / mutant.file).read_text(), mutant)
        found[str(mutant)] = {mutant.file.partition("/")[2]: source}, ("kernel",)
    return found


def killers(changed, implementations, cases, directory, most) -> list[str]:
    """Return the first cases that fail, at most so many; one that crashes or does not end fails, too."""
    names, killed = list(cases), []
    while names and len(killed) < most:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            left = {name: cases[name] for name in names}
            _run_cases(changed, implementations, left, directory, write, most - len(killed))
        os.close(write)
        passed, ended = _collect(read, pid)
        killed += [name for name, has_passed in zip(names, passed, strict=False) if not has_passed]
        names = names[len(passed) :]
        if ended == 0:
            break
        killed += names[:1]
        del names[:1]
    return killed[:most]


def _run_cases(changed, implementations, cases, directory, write, most) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    status = 1
    try:
        with copied(Path(tempfile.mkdtemp(dir=directory)), changed) as runtime:
            for case in cases.values():
                has_passed = _passes(case, implementations, runtime)
                os.write(write, b"1" if has_passed else b"0")
                most -= not has_passed
                if most == 0:
                    break
        status = 0
    finally:  # any other error ends this process as well
        os._exit(status)


def _passes(case, implementations, runtime) -> bool:
    try:
        assert_attention(case, "cpu", implementations, runtime)
    except AssertionError:
        return False
    return True


def _collect(read: int, pid: int) -> tuple[list[bool], int]:
    """Return which cases passed, as far as it came, and how it ended."""
    done: list[bool] = []
    while select.select([read], [], [], SECONDS)[0]:
        byte = os.read(read, 1)
        if not byte:
            break
        done.append(byte == b"1")
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(read)
    return done, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
