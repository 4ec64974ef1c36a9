"""`fp8kv generate`."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from calib import choices
from calib.commands.flags import (
    AsJson,
    Debug,
    Device,
    DType,
    Flag,
    Model,
    ProgressFlag,
    TrustRemoteCode,
)
from calib.commands.running import command, print_json

if TYPE_CHECKING:
    from calib.generate import GenerationResult


@command
def generate(
    context: typer.Context,
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    scales: Annotated[
        str | None, Flag("Scales of any tool; none: scale 1.0. Default: MODEL.", metavar="DIR")
    ] = None,
    max_new_tokens: Annotated[int, Flag("Tokens to generate at most.", min=1)] = 64,
    temperature: Annotated[float, Flag("0: the likeliest token every time.", min=0.0)] = 0.0,
    seed: Annotated[int, Flag("Seed of the sampling.", min=0, max=2**63 - 1)] = 42,
    chat: Annotated[bool, Flag("Apply the model's chat template.", "--chat")] = False,
    compare: Annotated[bool, Flag("Also generate with a 16-bit cache.", "--compare")] = False,
    cache: Annotated[
        str, Flag("Type of cache, such as int8_per_token_head (docs/runtime.md).", metavar="TYPE")
    ] = "fp8",
    backend: Annotated[choices.Backend, Flag("auto: Triton on a GPU, torch elsewhere.")] = "auto",
    device: Device = None,
    dtype: DType = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    progress: ProgressFlag = "auto",
    debug: Debug = False,
) -> None:
    """Continue a prompt with the model's KV cache in FP8, or another type."""
    from calib.commands.overrides import overrides
    from calib.commands.progress_bar import progress_bar
    from calib.generate import GenerationOptions, generate_text

    options = GenerationOptions(max_new_tokens, temperature, seed, chat, compare, backend, cache)
    given = overrides(context.params)
    with ExitStack() as shown:
        reported = shown.enter_context(progress_bar(progress, as_json=as_json))

        def on_text(text: str) -> None:
            shown.close()  # the text shows how far it is
            print(text, end="", flush=True)

        result = generate_text(
            model, prompt, scales=scales, options=options, overrides=given,
            on_text=None if as_json else on_text, progress=reported,
        )  # fmt: skip
    if as_json:
        print_json(result.to_json())
    else:
        print("\n".join(generation_lines(result)))


def generation_lines(result: "GenerationResult") -> list[str]:
    """Speed and cache sizes, which follow the text."""
    fp8, plain = result.fp8, result.plain
    name = "FP8" if result.block_size else result.cache
    blocks = f" in blocks of {result.block_size}" if result.block_size else ""
    if (in_blocks := result.bytes_per_token_in_blocks or 0) > result.bytes_per_token:
        blocks += f" ({in_blocks:,} bytes a token: smaller heads are filled up)"
    ratio = result.bytes_per_token / result.bytes_per_token_16bit
    lines = [
        "",
        f"{len(fp8.token_ids)} tokens in {fp8.seconds:.1f} s ({fp8.tokens_per_second:.1f} "
        "tokens/s, prompt included)",
        f"KV cache: {result.bytes_per_token:,} bytes a token in {name}, "
        f"{result.bytes_per_token_16bit:,} in 16 bits ({ratio:.2f}x)",
        f"{result.cached_tokens} tokens{blocks}: "
        f"{_mib(result.cache_bytes)}; in 16 bits {_mib(result.cache_bytes_16bit)}",
    ]
    if result.simulated:
        lines.append(f"simulated, so the speed is no engine's; known from {result.simulated}")
    if plain is not None:
        speed = f"; FP8 runs at {fp8.tokens_per_second / plain.tokens_per_second:.2f}x"
        same = f"the first {result.same_tokens} of {len(fp8.token_ids)} tokens are the same"
        lines += [
            "",
            f"with a 16-bit cache ({plain.tokens_per_second:.1f} tokens/s"
            f"{'' if result.simulated else speed}): {same}",
            plain.text,
        ]
    return lines + [f"warning: {warning}" for warning in result.warnings]


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"
