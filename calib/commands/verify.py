"""`fp8kv verify`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calib.commands.flags import AsJson, Debug, Flag
from calib.commands.running import command, print_json, print_lines, print_table

if TYPE_CHECKING:
    from calib.verify.result import Simulation
    from calib.verify.verification import Fit, Verification

_HEADINGS = ("engine", "K scales", "V scales", "Q scales", "FP8 cache")
_FIT_HEADINGS = ("layer", "K range used", "V range used", "clips")


@command
def verify(
    directory: Annotated[Path, typer.Argument(help="A checkpoint with FP8 KV-cache scales.")],
    engine: Annotated[
        str | None, Flag("vllm, aphrodite, sglang, tgi, tensorrt-llm, lmdeploy. Default: all.")
    ] = None,
    version: Annotated[str | None, Flag("Engine version. Default: the newest.")] = None,
    against: Annotated[
        Path | None, Flag("Statistics, or a calibration's output.", metavar="STATS")
    ] = None,
    tensor_parallel_size: Annotated[int, Flag("GPUs that the heads are split over.", min=1)] = 1,
    fnuz: Annotated[bool, Flag("For MI300 (gfx942), whose FP8 type ends at 240.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say which engine loads which scale, without the engine; exit 1 if something is wrong."""
    from calib.verify.result import Place
    from calib.verify.rules import choose_rules
    from calib.verify.verification import verify_directory

    place = Place(tensor_parallel_size, fnuz)
    found = verify_directory(directory, choose_rules(engine, version), against, place)
    if as_json:
        print_json(found.to_json())
    else:
        rows = [_engine_row(each) for each in found.simulations]
        model = found.architecture or "no architecture named"
        print_table(f"{directory}, {model}, on {place}", _HEADINGS, rows)
        if found.fits:
            print_table("Measured absmax", _FIT_HEADINGS, [_fit_row(fit) for fit in found.fits])
        print_lines(_closing_lines(found))
    if not found.is_good:
        raise typer.Exit(1)


def _engine_row(found: "Simulation") -> tuple[str, ...]:
    return (
        f"{found.rules.engine} {found.rules.versions}",
        *(_count(found, letter) for letter in "kvq"),
        "-" if found.refused else found.flag or "by itself",
    )


def _count(found: "Simulation", letter: str) -> str:
    if found.refused:
        return "crashes" if found.fate == "crash" else "refused"
    statuses = [outcome.status for outcome in found.outcomes if outcome.letter == letter]
    if "unknown" in statuses:
        return "not known"
    loaded = statuses.count("loaded")
    if loaded:
        return f"{loaded} of {len(statuses)}"
    return found.fate if letter != "q" and found.fate in ("dropped", "no place") else "1.0"


def _fit_row(fit: "Fit") -> tuple[str, ...]:
    return (
        str(fit.layer),
        *(f"{fit.used[x]:.0%}" if x in fit.used else "-" for x in "kv"),
        " and ".join(x.upper() for x in fit.clipped) or "-",
    )


def _closing_lines(found: "Verification") -> list[str]:
    """Why scales do not arrive, problems of the scales, and how sure this is."""
    lines = []
    for each in found.simulations:
        reasons = [each.refused] if each.refused else [reason for _, reason in each.ignored]
        more = [o.reason for o in each.outcomes if o.status != "default"]
        said = [*dict.fromkeys(reasons), *dict.fromkeys(more), each.problem]
        engine = f"{each.rules.engine} {each.rules.versions}"
        lines += [f"{engine}: {reason}" for reason in filter(None, said)][:4]
    lines += [f"problem: {problem}" for problem in found.problems]
    stored = {tensor.dtype for layer in found.scales.layers for tensor in layer.tensors}
    lines += [f"note: scales are stored as {x}, rounded" for x in sorted(stored & {"BF16", "F16"})]
    read = sorted({each.rules.engine for each in found.simulations if not each.rules.ran})
    if read:
        lines.append(f"rules of {', '.join(read)} were read in the source, not run")
    return lines
