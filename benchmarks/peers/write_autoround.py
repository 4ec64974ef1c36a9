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
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            model = tiny_llama.make(scratch / "model")
            amax = tiny_llama.true_amax(model)
            rounding = AutoRound(
                model,
                tiny_llama.tokenizer(),
                scheme="FP8_STATIC",
                iters=0,
                dataset=[row[None] for row in tiny_llama.token_ids()],
                nsamples=tiny_llama.SAMPLES,
                seqlen=tiny_llama.LENGTH,
                batch_size=1,
                static_kv_dtype="fp8",
                static_kv_granularity=granularity,
            )
            rounding.quantize_and_save(str(scratch / "output"), format="llm_compressor")
            written = next((scratch / "output").rglob("config.json")).parent
            tiny_llama.keep(written, "auto-round", granularity, amax)


if __name__ == "__main__":
    main()
