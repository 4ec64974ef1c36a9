"""What AutoRound writes of the tiny Llama: FP8 weights with static FP8 K and V, per layer and head.

Runs in an environment that holds auto-round, not ours: `make golden`.
"""

import tempfile
from pathlib import Path

import tiny_llama
from auto_round import AutoRound


def main() -> None:
    """Write and keep each."""
    for granularity in ("tensor", "head"):
        model = tiny_llama.make()
        amax = tiny_llama.true_amax(model)
        rounding = AutoRound(
            model,
            tiny_llama.tokenizer(),
            scheme="FP8_STATIC",
            iters=0,
            dataset=list(tiny_llama.token_ids()),
            nsamples=tiny_llama.SAMPLES,
            seqlen=tiny_llama.LENGTH,
            batch_size=1,
            static_kv_dtype="fp8",
            static_kv_granularity=granularity,
        )
        with tempfile.TemporaryDirectory() as directory:
            rounding.quantize_and_save(directory, format="llm_compressor")
            tiny_llama.keep(Path(directory), "auto-round", granularity, amax)


if __name__ == "__main__":
    main()
