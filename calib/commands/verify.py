"""`fp8kv verify`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calib.commands.flags import AsJson, Debug, Device, Flag, TrustRemoteCode
from calib.commands.running import command, print_json, print_lines, print_table
from calib.errors import InputError

if TYPE_CHECKING:
    from calib.engines.outcome import Place, Simulation
    from calib.engines.scale_fit import Fit
    from calib.engines.verification import Verification
    from calib.serving.server_logprobs import ServerComparison

_HEADINGS = ("engine", "K scales", "V scales", "Q scales", "FP8 cache")
_FIT_HEADINGS = ("layer", "K range used", "V range used", "clips")
_OF_RULES = {"engine", "version", "against", "tensor_parallel_size", "fnuz"}
_OF_SERVED = {"model", "served_name", "device", "trust_remote_code"}


@command
def verify(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(help="A checkpoint with FP8 KV-cache scales.")],
    engine: Annotated[
        str | None, Flag("vllm, aphrodite, sglang, tgi, tensorrt-llm, lmdeploy. Default: all.")
    ] = None,
    version: Annotated[str | None, Flag("Engine version. Default: the newest.")] = None,
    against: Annotated[Path | None, Flag("Statistics, or a calibration's output.", metavar="STATS")] = None,
    tensor_parallel_size: Annotated[int, Flag("GPUs that the heads are split over.", min=1)] = 1,
    fnuz: Annotated[bool, Flag("For MI300 (gfx942), whose FP8 type ends at 240.")] = False,
    served: Annotated[
        str | None, Flag("Ask a running OpenAI-compatible server, for 120 s.", metavar="URL")
    ] = None,
    model: Annotated[
        str | None, Flag("With --served: the weights. Default: DIRECTORY.", metavar="DIR")
    ] = None,
    served_name: Annotated[str | None, Flag("With --served: which of its models.", metavar="NAME")] = None,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say which engine loads which scale, without the engine; exit 1 if something is wrong."""
    _check_flags(context)
    if served is not None:
        _ask_server(context, served, directory, as_json)
        return
    from calib.engines.catalogue import choose_engines
    from calib.engines.outcome import Place
    from calib.engines.verification import verify_directory

    place = Place(tensor_parallel_size, fnuz)
    found = verify_directory(directory, choose_engines(engine, version), against, place)
    print_json(found.to_json()) if as_json else _print_found(found, place)
    if not found.is_good:
        raise typer.Exit(1)


def _print_found(found: "Verification", place: "Place") -> None:
    model = found.architecture or "no architecture named"
    title = f"{found.scales.directory.path}, {model}, on {place}"
    headings = (*_HEADINGS[:-1], "NVFP4 cache") if found.nvfp4 else _HEADINGS
    print_table(title, headings, [_engine_row(each, found.baked) for each in found.simulations])
    if found.fits:
        print_table("Measured absmax", _FIT_HEADINGS, [_fit_row(fit) for fit in found.fits])
    print_lines(_closing_lines(found))


def _check_flags(context: typer.Context) -> None:
    """Refuse flags that mean nothing with `--served`, and those that mean nothing without."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    word, useless = ("with", _OF_RULES) if "served" in given else ("without", _OF_SERVED)
    if given & useless:
        flags = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in given & useless))
        raise InputError(f"{flags} means nothing {word} --served URL; leave it out")


def _ask_server(context: typer.Context, url: str, directory: Path, as_json: bool) -> None:
    from calib.commands.overrides import overrides
    from calib.serving.server_logprobs import compare_served

    name, given = context.params["served_name"], overrides(context.params)
    model = context.params["model"] or str(directory)
    found = compare_served(url, directory, model, name, given)
    print_json(found.to_json()) if as_json else print_lines(_served_lines(found, model))
    if found.nearer != "scales":
        raise typer.Exit(1)


def _served_lines(found: "ServerComparison", model: str) -> list[str]:
    what = "given tokens" if found.of_prompt else "likeliest next tokens"
    lines = [
        "cannot tell whether the server uses the scales"
        if found.nearer == "cannot tell"
        else f"the server is nearer to {'the ' * (found.nearer == 'scales')}{found.nearer}",
        f"from our runtime with the scales {found.to_scales:.4f} nats, with 1.0 "
        f"{found.to_ones:.4f}; these two lie {found.apart:.4f} apart; the server's noise is "
        f"{found.noise:.4f}, our rounding {found.rounding:.4f}",
        f"(mean absolute difference of the logprobs of {found.logprobs:,} {what}; "
        f"{found.requests} requests in {found.seconds:.1f} s, our own runs in "
        f"{found.own_seconds:.1f} s)",
    ]
    if found.nearer == "cannot tell":
        lines.append(f"serve a model that needs its scales: fp8kv stress {model} -o twin")
    if found.nearer == "scales":
        lines.append("note: so is one with most of the scales, or a 16-bit cache; see its log")
    return lines


def _engine_row(found: "Simulation", baked: bool) -> tuple[str, ...]:
    return (
        found.engine.title,
        *(_count(found, letter, baked) for letter in "kvq"),
        "-" if found.refused else found.flag or "by itself",
    )


def _count(found: "Simulation", letter: str, baked: bool) -> str:
    if found.refused:
        return "crashes" if found.fate == "crash" else "refused"
    statuses = [outcome.status.value for outcome in found.outcomes if outcome.letter == letter]
    if "unknown" in statuses:
        return "not known"
    loaded = statuses.count("loaded")
    if baked and letter != "q":
        return "baked: right at 1.0"
    if loaded:
        return f"{loaded} of {len(statuses)}"
    return found.fate if letter != "q" and found.fate in ("dropped", "no place") else "1.0"


def _fit_row(fit: "Fit") -> tuple[str, ...]:
    return (
        str(fit.layer),
        *(_range(fit.least[x], fit.used[x]) if x in fit.used else "-" for x in "kv"),
        " and ".join(x.upper() for x in fit.clipped) or "-",
    )


def _range(least: float, most: float) -> str:
    """The share that is used, or the least and the largest of several scales."""
    shown = [f"{share:.0%}" if share >= 0.01 else f"{share * 100:.2g}%" for share in (least, most)]
    return shown[1] if least >= most * 0.99 or shown[0] == shown[1] else " to ".join(shown)


def _closing_lines(found: "Verification") -> list[str]:
    """Why scales do not arrive, problems of the scales, and how sure this is."""
    lines = []
    for each in found.simulations:
        reasons = [each.refused] if each.refused else [reason for _, reason in each.ignored]
        more = [o.reason for o in each.outcomes if o.status != "default"]
        said = [*dict.fromkeys(reasons), *dict.fromkeys(more), each.problem]
        lines += [f"{each.engine.title}: {reason}" for reason in filter(None, said)][:4]
        if each.engine.transformers_flag and each.engine.transformers_flag in (each.flag or ""):
            lines.append(f"{each.engine.title}: this holds with {each.engine.transformers_flag} alone")
    lines += [f"problem: {problem}" for problem in found.problems]
    lines += [f"warning: {warning}" for warning in found.warnings]
    lines += [f"values of an NVFP4 cache: {found.nvfp4}"] if found.nvfp4 else []
    stored = {tensor.dtype for layer in found.scales.layers for tensor in layer.tensors}
    lines += [f"note: scales are stored as {x}, rounded" for x in sorted(stored & {"BF16", "F16"})]
    read = sorted({each.engine.engine for each in found.simulations if not each.engine.ran})
    if read:
        lines.append(f"rules of {', '.join(read)} were read in the source, not run")
    return lines
