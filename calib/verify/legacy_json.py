"""`kv_cache_scales.json` as vLLM 0.4 read it: one mistake, and every scale is 1.0."""

from calib.scalefiles.file_names import JSON_FILE
from calib.scalefiles.folder import ScaleDirectory
from calib.scalefiles.scales_json import ScalesJson
from calib.verify.place import Place
from calib.verify.result import Outcome, Simulation, default


def simulate_json(directory: ScaleDirectory, place: Place, found: Simulation) -> None:
    """What becomes of the file in `place`."""
    found.flag = found.rules.flag
    config = directory.config or {}
    layers = config.get("num_hidden_layers")
    count = layers if isinstance(layers, int) and 0 < layers < 100_000 else 0
    count = count or len(next(iter(directory.json.ranks.values()), {}) if directory.json else {})
    modules = [f"layer {index}" for index in range(count)]
    wrong = _mistake(directory.json, config, count, place.ranks) if directory.json else None
    found.ignored += [(tensor.name, f"only {JSON_FILE} is read") for tensor in directory.tensors]
    if directory.json is None or wrong:
        found.ignored += [(JSON_FILE, wrong)] if wrong else []
        found.outcomes += [default(module, letter) for module in modules for letter in "kv"]
        return
    ranks = [directory.json.ranks[rank] for rank in range(place.ranks)]
    found.outcomes += [
        Outcome(module, letter, "loaded", tuple(scales[index] for scales in ranks))
        for index, module in enumerate(modules)
        for letter in "kv"
    ]


def _mistake(json: ScalesJson, config: dict[str, object], layers: int, ranks: int) -> str | None:
    """Why the loader throws the file away: it then logs, and serves on with 1.0."""
    wanted = config.get("model_type")
    if not json.has_model_type:
        return "it has no model_type, so all of it is thrown away"
    if wanted is not None and json.model_type != wanted:
        return f"its model_type is {json.model_type!r}, the model's {wanted!r}: thrown away"
    if json.dtype != "float8_e4m3fn":
        return f"its dtype is {json.dtype!r}; only 'float8_e4m3fn' is read"
    if set(json.ranks) != {*range(ranks)}:
        return f"it is for {len(json.ranks)} ranks, not for {ranks}: thrown away"
    missing = {layer for rank in json.ranks.values() for layer in set(range(layers)) ^ set(rank)}
    if missing:
        return f"layer {min(missing)} is missing or too many; every layer must be listed"
    return None
