"""Names of files that hold scales, or say where they are; the only home of each."""

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CARD_FILE = "README.md"
# ours
CALIBRATION_FILE = "fp8kv_calibration.json"
STATS_FILE = "fp8kv_stats.safetensors"
STRESS_FILE = "fp8kv_stress.json"
BAKE_FILE = "fp8kv_bake.json"
TEXT_FILE = "fp8kv_text.json"
PACK_FILE = "fp8kv_pack.json"
SOURCE_DIRECTORY = "fp8kv_source"
SCALES_SHARD = "model-fp8kv-scales.safetensors"
# vLLM 0.4 to 0.6; ModelOpt
JSON_FILE = "kv_cache_scales.json"
MODELOPT_FILE = "hf_quant_config.json"
