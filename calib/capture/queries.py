"""Of which classes it is shown that engines hand to attention the query that is measured.

Run: the class of vLLM 0.32 read the same tokens on the CPU with the same weights, and the largest
queries of each head agreed (tests/interop/check_queries.py). Read: its source was.
"""

from transformers import PreTrainedConfig

from calib.errors import InputError

_RUN = (
    *("Afmoe", "Apertus", "Arcee", "Cohere", "Cohere2", "Cohere2Moe", "Cwm", "Ernie4_5"),
    *("Ernie4_5_Moe", "Exaone4", "ExaoneMoe", "Falcon", "FlexOlmo", "GPTBigCode", "GPTNeoX"),
    *("Gemma", "Gemma2", "Gemma3", "Glm", "Glm4", "Glm4Moe", "GptOss", "Granite"),
    *("GraniteMoe", "GraniteMoeShared", "HunYuanDenseV1", "HyperCLOVAX", "Jais2", "Laguna"),
    *("Llama", "Llama4", "Ministral3", "Mistral", "Mixtral", "Nemotron", "OPT", "Olmo"),
    *("Olmo2", "Olmo3", "Olmoe", "Persimmon", "Phi", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3"),
    *("Qwen3Moe", "SeedOss", "SmolLM3", "StableLm", "Starcoder2", "VaultGemma"),
)
_RUN_SEEING = (
    *("Aria", "Blip2", "Exaone4_5_", "Gemma3", "Idefics3", "InternVL", "Llama4", "Llava"),
    *("LlavaNext", "LlavaNextVideo", "LlavaOnevision", "Mistral3", "Qwen3VL", "SmolVLM"),
)
_READ = (
    *("Dbrx", "FalconH1", "Gemma3n", "Gemma4", "Jamba", "Lfm2", "Lfm2Moe", "MiniMaxM2"),
    *("NemotronH", "Qwen3Next"),
)
RUN = frozenset(
    {"GPT2LMHeadModel"}
    | {f"{name}ForCausalLM" for name in _RUN}
    | {f"{name}ForConditionalGeneration" for name in _RUN_SEEING}
)
READ = frozenset(f"{name}ForCausalLM" for name in _READ) | {
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
}


def engine_class(config: PreTrainedConfig, otherwise: str) -> str:
    """Name the class that engines run a model with: the config's first, or `otherwise`."""
    named: object = config.architectures
    first = named[0] if isinstance(named, list) and named else named
    return first if isinstance(first, str) else otherwise


def check_queries(architecture: str, flag: str) -> None:
    """Refuse `flag`, which is about queries, for a class of which nothing is shown."""
    if architecture not in RUN | READ:
        raise InputError(
            f"{flag}: which query engines hand to attention is not known for {architecture}; "
            + ("use --targets kv" if "targets" in flag else "leave --attention out")
        )
