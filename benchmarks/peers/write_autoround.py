"""What AutoRound writes of the tiny Llama: FP8 weights with static FP8 K and V, per layer and head.

And NVFP4 weights with NVFP4 K and V.

Runs in an environment that holds auto-round, not ours: `make bench-golden`.
"""

import tempfile
from pathlib import Path

import tiny_llama
from auto_round import AutoRound


def main() -> None:
    """Write and keep each."""
    for case, scheme, cache, granularity in (
        ("tensor", "FP8_STATIC", "fp8", "tensor"),
        ("head", "FP8_STATIC", "fp8", "head"),
        ("nvfp4", "NVFP4", "nvfp4", "tensor"),
    ):
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            model = tiny_llama.make(scratch / "model")
            amax = tiny_llama.true_amax(model)
            rounding = AutoRound(
                model,
                tiny_llama.tokenizer(),
                scheme=scheme,
                iters=0,
                dataset=[row[None] for row in tiny_llama.token_ids()],
                nsamples=tiny_llama.SAMPLES,
                seqlen=tiny_llama.LENGTH,
                batch_size=1,
                static_kv_dtype=cache,
                static_kv_granularity=granularity,
            )
            rounding.quantize_and_save(str(scratch / "output"), format="llm_compressor")
            written = next((scratch / "output").rglob("config.json")).parent
            tiny_llama.keep(written, "auto-round", case, amax)


if __name__ == "__main__":
    main()
