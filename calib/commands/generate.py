"""`fp8kv generate`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from calib import choices
from calib.commands import flags
from calib.commands.running import Answer, job_command
from calib.commands.terminal import ModelText
from calib.progress import Progress

if TYPE_CHECKING:
    from calib.generate import GenerationResult


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

    def print_new_text(text: str) -> None:
        progress.end()  # the text shows how far it is
        print(text, end="", flush=True)

    result = generate_text(
        model, prompt, scales=scales, options=options, overrides=flags.recipe_keys(context.params),
        on_text=None if as_json else print_new_text, progress=progress,
    )  # fmt: skip
    return Answer(result.to_json(), _generation_lines(result))


def _generation_lines(result: "GenerationResult") -> Iterator[str]:
    """Yield speed and cache sizes, which follow the text."""
    fp8, plain = result.fp8, result.plain
    name = "FP8" if result.block_size else result.cache
    blocks = f" in blocks of {result.block_size}" if result.block_size else ""
    if (in_blocks := result.bytes_per_token_in_blocks or 0) > result.bytes_per_token:
        blocks += f" ({in_blocks:,} bytes a token: smaller heads are filled up)"
    ratio = result.bytes_per_token / result.bytes_per_token_16bit
    own, full = (f"{size / 2**20:.2f} MiB" for size in (result.cache_bytes, result.cache_bytes_16bit))
    yield ""
    yield (
        f"{len(fp8.token_ids)} tokens in {fp8.seconds:.1f} s ({fp8.tokens_per_second:.1f} tokens/s, "
        "prompt included)"
    )
    yield (
        f"KV cache: {result.bytes_per_token:,} bytes a token in {name}, "
        f"{result.bytes_per_token_16bit:,} in 16 bits ({ratio:.2f}x)"
    )
    own += " of codes, beside which a CPU keeps what they stand for" * result.keeps_decoded
    yield f"{result.cached_tokens} tokens{blocks}: {own}; {full} in 16 bits"
    if result.simulated:
        yield f"simulated, so the speed is not an engine's; known from {result.simulated}"
    if plain is not None:
        speed = f"; FP8 runs at {fp8.tokens_per_second / plain.tokens_per_second:.2f}x"
        equal = f"the first {result.same_tokens} of {len(fp8.token_ids)} tokens are the same"
        shown_speed = "" if result.simulated else speed
        yield from ("", f"with a 16-bit cache ({plain.tokens_per_second:.1f} tokens/s{shown_speed}): {equal}")
        yield ModelText(plain.text)
    yield from (f"warning: {warning}" for warning in result.warnings)
