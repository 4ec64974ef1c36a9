"""`fp8kv verify` and `fp8kv watch`: the scales that engines load, and whether they fit their traffic."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer

from calib import choices
from calib.commands import flags
from calib.commands.running import Answer, Block, TextTable, job_command, table_text
from calib.errors import Fp8kvError, InputError, NoModelError, NoScalesError
from calib.files.names import JSON_FILE, STATS_FILE
from calib.files.text import parse_condition, show_duration, show_layers
from calib.progress import Progress

if TYPE_CHECKING:
    from calib.engines.catalogue import Backend, Engine
    from calib.engines.outcome import Place, Simulation
    from calib.engines.scale_fit import Fit
    from calib.engines.verification import Verification
    from calib.evaluate.served.client import ServedScales
    from calib.evaluate.served.watch_report import WatchReport


_HEADINGS = ("engine", "K scales", "V scales", "Q scales")
_FIT_HEADINGS = ("layer", "K range used", "V range used", "clips")
_WATCH_HEADINGS = ("layer", "tokens", "clipped", "95 % interval", "expected", "zeros")
_SHOWN = 12  # rows, of the worst layers
_OLD = 60.0  # seconds
_REFRESH = (
    "note: if the engine still runs, ask it at its address (fp8kv watch http://HOST:PORT): it then writes "
    "what it has counted since, except with data parallelism"
)
# flags without and with --served
_SIMULATION_FLAGS = {"engine", "version", "backend", "against", "tensor_parallel_size", "fnuz"}
_SERVER_FLAGS = {"model", "served_name", "device", "trust_remote_code"}


@job_command
def verify(
    context: typer.Context,
    directory: Path = typer.Argument(..., help="A checkpoint with FP8 KV-cache scales.", metavar="DIRECTORY"),
    engine: str | None = flags.option(
        "Check this engine: vllm, aphrodite, sglang, tgi, tensorrt-llm or lmdeploy. Default: all."
    ),
    version: str | None = flags.option("Check this version of the engine. Default: the newest."),
    backend: str | None = flags.option(
        "Say which copies of a scale this attention backend of the engine computes with, such as FLASHINFER."
    ),
    against: Path | None = flags.option(
        "Compare the scales with these statistics, or with this output of calibrate.", metavar="OUTPUT"
    ),
    tensor_parallel_size: int = flags.option(
        "Split the heads over this many GPUs.", min=1, metavar="COUNT", default=1
    ),
    fnuz: bool = flags.option(
        "Check for MI300 (gfx942), whose FP8 type ends at 240.", "--fnuz", default=False
    ),
    served: list[str] | None = flags.option(
        "Ask this running, OpenAI-compatible server whether it uses the scales. Asking takes 120 s at most; "
        "our own runs of the model come on top. Repeat it to compare several servers that run our plugin: do "
        "they hold the same scales, and read each other's KV blocks rightly?",
        metavar="URL",
    ),
    model: str | None = flags.option(
        "With --served, read the weights here. Default: DIRECTORY.", metavar="MODEL"
    ),
    served_name: str | None = flags.option("With --served, ask this of the server's models.", metavar="NAME"),
    device: choices.Device | None = flags.option(
        "With --served, run our own model on this device. Default: cpu, as the server may fill the GPU."
    ),
    trust_remote_code: bool = flags.TRUST_REMOTE_CODE,
    *,
    progress: Progress,
) -> Answer:
    """Show which engine loads which scale, without running the engine.

    The exit status is 1 if something is wrong.
    """
    _check_flags(context)
    if served and len(served) > 1:
        return _compare_servers(served, directory)
    if served:
        keys = flags.recipe_keys(context.params)
        return _compare_server(served[0], directory, model or str(directory), served_name, keys, progress)
    from calib.engines.catalogue import choose_engines
    from calib.engines.outcome import Place
    from calib.engines.verification import backend_problems, verify_directory

    engines, place = choose_engines(engine, version), Place(tensor_parallel_size, fnuz)
    if backend is not None and engine is None:
        raise InputError(f"--backend {backend}: of which engine? Add --engine")
    copies = engines[0].find_backend(backend) if backend else None
    calibration, notes = None, list[str]()
    if against is not None:
        from calib.transfer.traffic import open_measured

        calibration, notes = open_measured(against, directory)
    report = verify_directory(directory, engines, calibration, place)
    answer = report.to_json() | {"notes": notes}
    notes = [*notes, *report.next_step(against)]
    blocks = chain(_report_blocks(report, place), (f"note: {note}" for note in notes))
    if backend and report.baked == "int8":
        raise InputError(
            f"'{directory}' is baked for int8, whose cache makes its own scales; leave --backend out"
        )
    if backend and copies:
        answer["backend"] = {**copies.model_dump(), "name": backend, "copies": engines[0].scale_copies}
        problems = backend_problems(report, copies)
        answer["good"] = report.is_good and not problems
        answer["backend"]["problems"] = problems
        lines = (f"problem: {engines[0].title}, {backend}: {problem}" for problem in problems)
        blocks = chain(blocks, _backend_lines(engines[0], backend, copies, report.scales.strategy), lines)
    return Answer(answer, blocks, is_good=answer["good"])


def _check_flags(context: typer.Context) -> None:
    """Refuse flags that mean nothing with `--served`, without it, or with several."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    names = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    word, useless = ("with", _SIMULATION_FLAGS) if "served" in names else ("without", _SERVER_FLAGS)
    if len(context.params["served"] or ()) > 1:
        word, useless = "with more than one", _SIMULATION_FLAGS | _SERVER_FLAGS
    if names & useless:
        flags = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in names & useless))
        raise InputError(f"{flags} means nothing {word} --served URL; leave it out")


def _compare_server(
    url: str,
    directory: Path,
    weights: str,
    served_name: str | None,
    keys: dict[str, Any],
    progress: Progress,
) -> Answer:
    from calib.evaluate.served.logprobs import compare_served, describe_comparison

    comparison = compare_served(url, directory, weights, served_name, keys, progress)
    is_other = comparison.is_other_model(directory, weights)
    plugin, is_compared = _ask_plugin(url, directory)
    has_problems = bool(plugin and plugin.problems)
    # where scales move logprobs by little more than noise, only the engine can say that it uses them
    is_proven = is_compared and not has_problems and comparison.is_like_both
    is_good = is_proven or comparison.nearer == "scales"
    word = False if has_problems else is_proven or None
    lines = [*describe_comparison(comparison, weights, is_other=is_other, plugin_word=word)]
    root = comparison.root
    if root and comparison.nearer != "neither" and Path(root).resolve() != directory.resolve():
        lines.append(f"note: it says that it serves {root!r:.200}, and not '{directory}'")
    lines += (f"problem: {problem}" for problem in comparison.problems)
    lines += _plugin_lines({url: plugin})
    answer = {**asdict(comparison), "plugin": plugin and plugin.model_dump()}
    return Answer(answer, lines, is_good=is_good and not (has_problems or comparison.problems))


def _compare_servers(urls: list[str], directory: Path) -> Answer:
    from calib.engines.loaded_scales import read_engine_scales
    from calib.engines.verification import find_own_problems
    from calib.evaluate.served.client import open_servers
    from calib.same_model.check import open_with_weights

    files = read_engine_scales(directory)
    servers = {url: server.scales(files) for url, server in open_servers(urls).items()}
    addresses: dict[str, str] = {}
    for url, scales in servers.items():
        first = addresses.setdefault(scales.server, url)
        if first != url:
            raise InputError(f"--served {first} and {url} are one server; give each server once")
    is_same = len({scales.fingerprint for scales in servers.values()}) == 1
    problems = find_own_problems(directory, open_with_weights(directory) if files.layers else None)
    has_problems = any(scales.problems for scales in servers.values())
    name = "the same scales" if has_problems else f"the scales of '{directory}'"
    lines = [
        *(f"problem: {problem}" for problem in problems),
        *_plugin_lines(servers),
        f"the servers store with {name}: each reads the other's KV blocks rightly"
        if is_same
        else "problem: the servers store with different scales: KV blocks of one are wrong in the other",
    ]
    answer = {"same": is_same, "servers": {url: scales.model_dump() for url, scales in servers.items()}}
    is_good = is_same and not (has_problems or problems)
    return Answer(answer | {"problems": problems}, lines, is_good=is_good)


def _ask_plugin(url: str, directory: Path) -> "tuple[ServedScales | None, bool]":
    """Return what our plugin in a server says, None without one, and whether files were compared with all."""
    from calib.engines.loaded_scales import read_engine_scales
    from calib.evaluate.served.client import Server

    files = None
    with suppress(NoModelError, NoScalesError):  # a pack, or format fp8kv, which no engine loads
        files = read_engine_scales(directory)
    with suppress(InputError):  # without a plugin; a damaged answer is an error
        plugin = Server(url).scales(files)
        return plugin, bool(files and plugin.layers) and plugin.in_use == plugin.total
    return None, False


def _plugin_lines(servers: "Mapping[str, ServedScales | None]") -> Iterator[str]:
    for url, scales in servers.items():
        if scales is None:
            continue
        counts = f"{scales.in_use} of {scales.total} KV scales in use"
        yield f"{url}: {counts}, fingerprint {scales.fingerprint or 'none'}"
        yield from (f"problem: {url}: {problem}" for problem in scales.problems)
        yield from (f"note: {url}: {note}" for note in scales.notes)


def _backend_lines(
    engine: "Engine", name: str, backend: "Backend", strategy: choices.Strategy
) -> Iterator[str]:
    steps = (
        (engine.scale_copies[copy].format(x="k") for copy in step) for step in (backend.write, backend.read)
    )
    written, read = (", ".join(names) for names in steps)
    yield f"{engine.title}, {name}: stores with {written}, attends with {read} (V's alike)"
    single = [key for key in [*engine.scale_copies][1:] if key in (*backend.write, *backend.read)]
    if strategy == "attn_head" and single:
        names = " and ".join(engine.scale_copies[key].format(x="k") for key in single)
        yield f"{name}: these scales are per head, and of them {names} has the largest alone, for all heads"
    if backend.note:
        yield f"{name}: {backend.note}"
    if backend.freezes:
        yield f"{name}: factors that it computes at the first step stay, whatever becomes of the scales"
    yield from (f"warning: {engine.title}: {trap}" for trap in engine.traps)


def _report_blocks(report: "Verification", place: "Place") -> Iterator[Block]:
    """Yield what each engine loads, why scales do not arrive, their problems, and how sure this is."""
    from calib.engines.catalogue import find_engine

    simulations = report.simulations
    directory = report.scales.directory
    model = report.architecture or ("no architecture named" if directory.has_config else "no config.json")
    if report.baked == "int8":
        model += ", baked for int8"
    headings = (*_HEADINGS, f"{'NVFP4' if report.nvfp4 else (report.baked or 'fp8').upper()} cache")
    rows = [
        (
            x.engine.title,
            *(_count(x, qkv, report.baked) for qkv in "kvq"),
            _show_flag(x, report.baked),
        )
        for x in simulations
    ]
    yield TextTable(f"{directory.path}, {model}, on {place}", headings, rows)
    if report.fits:
        yield TextTable("Measured absmax", _FIT_HEADINGS, [_fit_row(fit) for fit in report.fits])
    for simulation in simulations:
        yield from _reason_lines(simulation)
    yield from (f"problem: {problem}" for problem in report.problems)
    yield from (f"warning: {warning}" for warning in report.warnings)
    if directory.json and not any(layer.tensors for layer in report.scales.layers):
        yield from _json_lines(directory.path)
    if report.nvfp4:
        yield f"values of an NVFP4 cache: {report.nvfp4}"
    if report.skipped:
        layers = show_layers(report.skipped)
        argument = find_engine("vllm").skip_argument(report.skipped)
        yield (
            f"the config leaves {layers} in 16 bits: so does vLLM with our plugin, or with {argument}; other "
            "engines hold them in FP8"
        )
    stored = {tensor.dtype for layer in report.scales.layers for tensor in layer.tensors}
    yield from (f"note: scales are stored as {dtype}, rounded" for dtype in sorted(stored & {"BF16", "F16"}))
    unrun = sorted({simulation.engine.engine for simulation in simulations if not simulation.engine.ran})
    if unrun:
        yield f"rules of {', '.join(unrun)} were read in the source, not run"


def _json_lines(directory: Path) -> Iterator[Block]:
    """Say who reads scales that are in JSON alone, and how other engines get them."""
    from calib.engines.catalogue import load_catalogue

    reader = next(engine for engine in load_catalogue().values() if engine.reads == "json")
    yield f"{JSON_FILE} is for {reader.engine} {reader.versions}: serve the model with {reader.flag}"
    way = f"put {JSON_FILE} into a copy of the model, and fp8kv convert that"
    if (directory / STATS_FILE).exists():
        way = f"fp8kv apply {quote(str(directory))} MODEL -o OUTPUT"
    yield f"for other engines, {way}"


def _show_flag(simulation: "Simulation", baked: choices.Purpose | None) -> str:
    """Return the flags that the user must add for the cache, if the config alone does not turn it on."""
    if simulation.refused or (baked == "int8" and not simulation.flag):
        return "-"
    return simulation.flag or "without a flag"


def _count(simulation: "Simulation", letter: str, baked: choices.Purpose | None) -> str:
    """Return how many scales of K, V or Q the engine loads, or what becomes of them."""
    if simulation.refused:
        return "crashes" if simulation.fate == "crash" else "refused"
    statuses = [outcome.status.value for outcome in simulation.outcomes if outcome.letter == letter]
    if "unknown" in statuses:
        return "not known"
    if baked == "int8":
        return "made per token" if simulation.flag and letter != "q" else "-"
    if baked and letter != "q":
        return "baked: right at 1.0"
    if loaded := statuses.count("loaded"):
        return f"{loaded} of {len(statuses)}"
    return simulation.fate if letter != "q" and simulation.fate in ("dropped", "no place") else "1.0"


def _reason_lines(simulation: "Simulation") -> Iterator[str]:
    title, flag = simulation.engine.title, simulation.engine.transformers_flag
    reasons = [simulation.refused] if simulation.refused else [reason for _, reason in simulation.ignored]
    reasons += [outcome.reason for outcome in simulation.outcomes if outcome.status != "default"]
    reasons = [simulation.problem or "", simulation.per_head_note, simulation.gap, *dict.fromkeys(reasons)]
    yield from (f"{title}: {reason}" for reason in [*filter(None, reasons)][:4])
    if simulation.draft:
        yield f"{title}: {simulation.draft}"
    if flag and flag in (simulation.flag or ""):
        yield f"{title}: this holds with {flag} alone"


def _fit_row(fit: "Fit") -> tuple[str, ...]:
    return (
        f"{fit.layer} (draft)" if fit.is_draft else str(fit.layer),
        *(_show_share(fit, x) if x in fit.used else "-" for x in "kv"),
        " and ".join(x.upper() for x in fit.clipped) or "-",
    )


def _show_share(fit: "Fit", letter: str) -> str:
    """Format the share that is used, or the least and the largest of several scales."""
    least, most = fit.least[letter], fit.used[letter]
    low, high = (f"{share:.0%}" if share >= 0.01 else f"{share * 100:.2g}%" for share in (least, most))
    share = high if least >= most * 0.99 or low == high else f"{low} to {high}"
    is_known = letter not in fit.estimated and fit.sure[letter] == most
    return share if is_known else f"about {share}"


@job_command
def watch(
    source: str = typer.Argument(
        ..., help="The directory that FP8KV_WATCH names, or the address of a vLLM server.", metavar="DIR|URL"
    ),
    fail_if: list[str] = flags.option(
        "Exit with 1 if a layer surely has clipped>SHARE of tokens, and twice what was expected, or "
        "zero>SHARE of values.",
        default=["clipped>0.01"],
        metavar="CONDITION",
    ),
    model: Path | None = flags.option(
        "Read what was expected in this calibration of the engine's model. Default: that model, where the "
        "engine is on this machine.",
        metavar="MODEL",
    ),
    follow: bool = flags.option(
        "Show it live, until it fails or you press Ctrl-C.", "--follow", default=False
    ),
    every: float = flags.option(
        "With --follow, look again after this many seconds.", default=5.0, min=0.1, max=86400
    ),
) -> Answer:
    """Show whether the scales of a running engine fit its traffic: which layers clip.

    The engine is a vLLM with our plugin, started with FP8KV_WATCH=DIR. The exit status is 1 for a layer whose
    scales are too small.
    """
    from calib.evaluate.served.watch_report import METRICS

    condition = parse_condition(fail_if[-1], METRICS)
    if len(fail_if) > 1 or condition.variant is not None or not condition.compare(2, 1):
        raise InputError(f"--fail-if '{' '.join(fail_if)}': give one condition, clipped>SHARE or zero>SHARE")
    if not condition.compare(1, condition.limit):
        raise InputError(f"--fail-if '{condition.text}': no share is above 1; write 0.01 for 1 %")
    is_address = source.lower().startswith(("http://", "https://"))

    def look() -> "WatchReport":
        from calib.evaluate.served.client import Server
        from calib.evaluate.served.watch_report import read_expected, read_watched, report_on

        server = Server(source) if is_address else None
        watched = server.watched() if server else read_watched(Path(source))
        if model:
            return report_on(watched, condition, *read_expected(model, watched))
        beside, refusal = Path(watched.model), ""
        try:  # on another machine the same path may hold another calibration
            if server is None or server.is_local:
                return report_on(watched, condition, *read_expected(beside, watched))
        except (Fp8kvError, OSError) as error:
            refusal = str(error) if (beside / STATS_FILE).is_file() else ""
        return report_on(watched, condition, None, refusal=refusal)

    report = _follow(look, every) if follow else look()
    failures = report.failures
    if report.alarms:
        failures[-1] += f"; {report.advice(None if is_address else Path(source))}"
    is_old = report.watched.age >= _OLD and not is_address
    return Answer(report.to_json(), chain(_watch_blocks(report), [_REFRESH] if is_old else []), failures)


def _follow(look: "Callable[[], WatchReport]", every: float) -> "WatchReport":
    """Show what `look` returns until a layer fails."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    # on stderr: stdout has the answer at the end
    console = Console(stderr=True)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            report = look()
            parts = (table_text(x) if isinstance(x, TextTable) else f"{x}\n" for x in _watch_blocks(report))
            text = Text("".join(parts))
            if console.is_terminal:
                live.update(text, refresh=True)
            else:
                console.print(text)
            if report.alarms:
                return report
            time.sleep(every)


def _watch_blocks(report: "WatchReport") -> Iterator[Block]:
    watched = report.watched
    yield f"{watched.engine}, {watched.model}"
    age = show_duration(watched.age)
    yield f"{watched.tokens:,} tokens from {watched.since} to {watched.written}, {age} ago"
    if report.rows:
        metric, alarms = report.condition.metric, report.alarms
        ordered = sorted(report.rows, key=lambda x: (x not in alarms, -getattr(x, metric), x.layer, x.letter))
        cells = [
            (
                f"{row.layer} {row.letter}",
                f"{row.tokens:,}",
                f"{row.clipped:.2%}",
                f"{row.low:.2%} to {row.high:.2%}",
                "-" if row.expected is None else f"{row.expected:.2%}",
                f"{100 * row.zero:.2g}%",
            )
            for row in ordered[:_SHOWN]
        ]
        yield TextTable(f"fingerprint {watched.fingerprint}", _WATCH_HEADINGS, cells)
        if (hidden := len(report.rows) - _SHOWN) > 0:
            yield f"and {hidden} more rows, which --json has"
        yield from report.notes
    else:
        yield "the cache is in 16 bits: nothing is clipped, and the statistics have the largest values"
