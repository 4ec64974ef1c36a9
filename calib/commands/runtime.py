"""`fp8kv generate`, `fp8kv bench` and `fp8kv doctor`: our runtime, on this machine."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import typer

from calib import choices
from calib.commands import flags
from calib.commands.progress_bar import progress_bar
from calib.commands.running import Answer, ModelText, TextTable, job_command
from calib.progress import Progress

if TYPE_CHECKING:
    from calib.bench.run import BenchResult
    from calib.generate import GenerationResult

_BENCH_HEADINGS = ("kernel", "sequences", "FP8, µs", "TB/s", "of a copy", "float16, µs", "float16 / FP8")


@job_command
def generate(
    context: typer.Context,
    model: str = flags.MODEL,
    prompt: str = typer.Argument(..., help="The text to continue.", metavar="PROMPT"),
    scales: str | None = flags.option(
        "Use the scales in this directory, which any tool may have written; `none` is scale 1.0. "
        "Default: MODEL.",
        metavar="DIR",
    ),
    max_new_tokens: int = flags.option("Generate at most this many tokens.", min=1, default=64),
    temperature: float = flags.option(
        "Sample at this temperature. At 0, always take the likeliest token.", min=0.0, default=0.0
    ),
    seed: int = flags.option("Sample with this seed.", min=0, max=2**63 - 1, metavar="INTEGER", default=42),
    chat: bool = flags.option("Apply the model's chat template to the prompt.", "--chat", default=False),
    compare: bool = flags.option("Also generate with a 16-bit cache.", "--compare", default=False),
    cache: str = flags.option(
        "Use this type of cache, such as int8_per_token_head. See docs/runtime.md.",
        metavar="TYPE",
        default="fp8",
    ),
    backend: choices.Backend = flags.option(
        "Run attention in Triton or torch; `auto` is Triton on a GPU, else torch.", default="auto"
    ),
    device: choices.Device | None = flags.DEVICE,
    dtype: choices.DType | None = flags.DTYPE,
    trust_remote_code: bool = flags.TRUST_REMOTE_CODE,
    *,
    as_json: bool,
    progress: Progress,
) -> Answer:
    """Continue a prompt with the model's KV cache in FP8, or in another type."""
    from calib.generate import GenerationOptions, generate_text

    options = GenerationOptions(max_new_tokens, temperature, seed, chat, compare, backend, cache)

    heading = f"with the cache in {'FP8' if cache == 'fp8' else cache}:\n" if compare else ""

    def print_new_text(text: str) -> None:
        nonlocal heading
        progress.end()  # the text shows how far it is
        print(f"{heading}{text}", end="", flush=True)
        heading = ""

    result = generate_text(
        model, prompt, scales=scales, options=options, overrides=flags.recipe_keys(context.params),
        on_text=None if as_json else print_new_text, progress=progress,
    )  # fmt: skip
    return Answer(result.to_json(), _generation_lines(result))


def _generation_lines(result: "GenerationResult") -> Iterator[str]:
    """Yield speed and cache sizes, which follow the text."""
    fp8, plain = result.fp8, result.plain
    name, blocks = ("FP8", f" in blocks of {result.block_size}") if result.block_size else (result.cache, "")
    if (in_blocks := result.bytes_per_token_in_blocks or 0) > result.bytes_per_token:
        blocks += f" ({in_blocks:,} bytes a token: smaller heads are filled up)"
    tokens, size, size_16bit = len(fp8.token_ids), result.bytes_per_token, result.bytes_per_token_16bit
    own, full = (f"{count / 2**20:.2f} MiB" for count in (result.cache_bytes, result.cache_bytes_16bit))
    speed = f"{fp8.tokens_per_second:.1f} tokens/s, prompt included"
    yield from ("", f"{tokens} token{'' if tokens == 1 else 's'} in {fp8.seconds:.1f} s ({speed})")
    ratio = f"{size / size_16bit:.2f}x"
    yield f"KV cache: {size:,} bytes a token in {name}, {size_16bit:,} in 16 bits ({ratio})"
    if result.keeps_decoded:
        own += " (without the float32 copy that a CPU keeps beside it)"
    yield f"{result.cached_tokens} tokens{blocks}: {own}; {full} in 16 bits"
    if result.simulated:
        yield f"simulated, so the speed is not an engine's; known from {result.simulated}"
    if plain is not None:
        equal = f"the first {result.same_tokens} of {tokens} tokens are the same"
        speed = f"{plain.tokens_per_second:.1f} tokens/s; one run each is not a benchmark"
        yield from ("", f"with a 16-bit cache ({speed}): {equal}")
        yield ModelText(plain.text)
    yield from (f"warning: {warning}" for warning in result.warnings)


@job_command
def bench(
    model: str | None = typer.Argument(
        None,
        help="Take the shape of this model: a config.json, a model directory, a Hub id, or "
        "`builtin:smollm2`.",
        metavar="MODEL",
    ),
    heads: str = flags.option(
        "Without MODEL, use this many query heads and KV heads, of this size.",
        metavar="H/K/D",
        default="32/8/128",
    ),
    block_size: int = flags.option("Store this many tokens in a block of the cache.", min=1, default=64),
    trust_remote_code: bool = flags.TRUST_REMOTE_CODE,
    progress: choices.ProgressForm = flags.PROGRESS,
) -> Answer:
    """Check the kernels against their references, then time them on this GPU at a model's shape."""
    from calib.doctor import interpret_without_gpu

    interpret_without_gpu()
    from calib.bench.run import attention_heads, parse_heads, run_bench

    shape = attention_heads(model, trust_remote_code=trust_remote_code) if model else parse_heads(heads)
    # a line for each case is progress enough, and would tear a bar
    has_lines, say = progress == "auto", partial(print, file=sys.stderr)
    say_case = say if has_lines else lambda *words, **options: None
    with progress_bar(progress, hidden=has_lines) as stages:
        result = run_bench(shape, block_size, say=say, say_case=say_case, progress=stages)
    return Answer(asdict(result), [_bench_table(result)] if result.rows else [])


def _bench_table(result: "BenchResult") -> TextTable:
    shape = "/".join(map(str, result.heads))
    rows = []
    for row in result.rows:
        share = row.tb_per_s / result.copy_tb_per_s if result.copy_tb_per_s else 0.0
        times = (f"{row.us:.1f}", f"{row.tb_per_s:.2f}", f"{share:.0%}", f"{row.float16_us:.1f}")
        rows.append((row.kernel, row.case, *times, f"{row.float16_us / row.us:.2f}x"))
    return TextTable(f"{result.gpu}: {shape} query heads / KV heads / head_dim", _BENCH_HEADINGS, rows)


@job_command
def doctor() -> Answer:
    """Show what this machine can run: GPU, FP8 support, Triton, and versions."""
    from calib.doctor import examine

    facts = examine()
    return Answer(dict(facts), [TextTable("This machine", ("what", "found"), facts)])
