"""Which mistakes in the attention kernels each case of the tests notices, and which cases that takes."""

import argparse
import os
import signal
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # which is read when Triton is imported
sys.path.extend(str(Path(__file__).parents[2] / path) for path in ("", "tests/support", "tests/runtime"))

import torch
from checks import assert_attention
from kernel_grid import name_of, paired_cases
from kernel_setting import table_of_small_tiles
from mutants import copied, mutated
from mutate import apply, find_mutants, sample
from test_mutations import CHECKS, MUTATIONS

ROOT = Path(__file__).parents[2]
FILES = [f"fp8kv_runtime/kernels/{name}.py" for name in ("attend", "decode", "extend")]
SECONDS = 60  # for one case: a mutant may loop for ever


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="of random ones")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = {name_of(case): case for case in paired_cases()}
    os.environ["FP8KV_TUNING"] = str(table_of_small_tiles(Path(tempfile.mkdtemp())))
    assert not killers({}, ("kernel", "reference"), cases, most=1), "it fails without a mutant"
    kept, alone = {}, defaultdict(list)
    wrong, doubtful = dict(mutants(options.seed, options.count)), []
    for mutant, where in wrong.items():
        # two of those taken so far; one more is taken where none of them notices
        found = killers(*where, kept, most=2) or killers(*where, cases, most=1)
        kept |= {name: cases[name] for name in found}
        doubtful += [mutant] * (len(found) == 1)
        print(f"{found or 'SURVIVED'}  {mutant}", flush=True)
    for mutant in doubtful:
        found = killers(*wrong[mutant], kept, most=2)
        if len(found) == 1:
            alone[found[0]].append(mutant)
    for name in kept:
        print(f"{name}: {len(alone[name])} alone, such as {alone[name][:3]}")


def mutants(seed, count):
    for name, (check, file, *replacements) in MUTATIONS.items():
        if CHECKS[check].func is assert_attention:
            yield name, ({file: mutated(file, *replacements)}, (check.split()[-1],))
    random = [mutant for mutant in find_mutants(ROOT) if mutant.file in FILES]
    for mutant in sample(random, count, seed):
        source = apply((ROOT / mutant.file).read_text(), mutant)
        yield str(mutant), ({mutant.file.partition("/")[2]: source}, ("kernel",))


def killers(changed, implementations, cases, most):
    """Return the first cases that fail, at most so many; one that crashes or does not end fails, too."""
    killed = []
    for name, case in cases.items():
        pid, status = os.fork(), 1
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            signal.alarm(SECONDS)
            try:
                with tempfile.TemporaryDirectory() as directory, copied(Path(directory), changed) as runtime:
                    assert_attention(case, "cpu", implementations, runtime)
                status = 0
            finally:
                os._exit(status)
        killed += [name] * (os.waitpid(pid, 0)[1] != 0)
        if len(killed) == most:
            break
    return killed


if __name__ == "__main__":
    main()
