"""A recipe fully determines a calibration: what to measure, on which data, and what to write."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from calib import choices
from calib.arguments import check_arguments, to_path
from calib.caches.types import CacheName
from calib.errors import InputError, did_you_mean
from calib.files.text import parse_condition, parse_size
from calib.strict_yaml import StrictModel, explain, read_yaml

ULTRACHAT = "HuggingFaceH4/ultrachat_200k"
Headroom = Annotated[float, Field(ge=1 / 16, le=16, allow_inf_nan=False)]


def _legal(parse: Callable[[str], Any]) -> AfterValidator:
    """Return a validator of text that `parse` takes; the text stays as it is."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


# a dataset's name, or where it is
Source = Annotated[str, BeforeValidator(lambda path: str(path) if isinstance(path, os.PathLike) else path)]
AnySettings = TypeVar("AnySettings", bound="Settings")


class Settings(StrictModel):
    """A part of a recipe; a wrong value is an InputError of one line, also in Python."""

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise InputError(explain(None, error, type(self))) from None

    # pydantic's own mark: it need not call this `__init__` for each part that it reads
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise InputError(
            f"{name} cannot be set, a recipe is frozen; name its settings where it is made, "
            "calib.Recipe(...), or make another with recipe.model_copy(update={...})"
        )

    def model_copy(
        self: AnySettings, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> AnySettings:
        """Return a copy with the values of `update`, which are checked like all settings."""
        copy = super().model_copy(deep=deep)
        values = {name: getattr(copy, name) for name in self.model_fields_set}
        return type(self)(**{**values, **(update or {})})


class ObserverRecipe(Settings):
    """The observer, which derives an amax from the statistics."""

    name: choices.ObserverName = "absmax"
    percentile: float = Field(default=99.99, gt=50, le=100, description="used by `percentile` only")

    @property
    def needs_histogram(self) -> bool:
        """Return whether the observer reads a histogram of every head."""
        return choices.OBSERVERS[self.name].needs_histogram


class DataRecipe(Settings):
    """The text, pictures and sound that the model reads during calibration."""

    dataset: Source = ULTRACHAT
    config: str | None = Field(default=None, description="Hub dataset configuration")
    split: str | None = Field(default=None, description="Hub dataset split; found when not given")
    column: str | None = Field(default=None, description="text or chat column; found when not given")
    images: str | None = Field(default=None, description="column of pictures, for a model that takes them")
    audio: str | None = Field(default=None, description="column of sound, for a model that takes it")
    samples: int = Field(default=512, ge=1)
    seq_len: int = Field(default=2048, ge=2, description="tokens of a sample; a long document is several")
    batch_size: PositiveInt | Literal["auto"] = Field(default="auto", description="samples in a pass")
    seed: int = Field(default=42, ge=0, lt=2**63, description="also of the order of batches")
    skip_first: int = Field(default=0, ge=0, description="tokens of each sample left out of statistics")
    allow_few_tokens: bool = Field(
        default=False, description="calibrate on fewer than 64 tokens, or than 16 different ones"
    )
    until: float | None = Field(
        default=None,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="stop where 4 times as many tokens are expected to add less",
    )


class ExportRecipe(Settings):
    """The files that are written for the engines."""

    formats: tuple[choices.FormatName, ...] = ("vllm",)
    reduce: choices.Reduce = "none"
    tp_size: int = Field(default=1, ge=1, description="ranks in kv_cache_scales.json")
    weights: choices.Weights = "link"

    @field_validator("formats")
    @classmethod
    def _refuse_none(cls, formats: tuple[choices.FormatName, ...]) -> tuple[choices.FormatName, ...]:
        if not formats:
            raise ValueError(f"name one or more of {', '.join(choices.FORMATS)}; without the key it is vllm")
        return formats


class EvaluationRecipe(Settings):
    """The measurements of `--evaluate` and `fp8kv-eval`; see docs/evaluation.md."""

    suite: choices.SuiteName = "quick"
    dataset: Source | None = Field(default=None, description="default: the calibration's")
    samples: int | None = Field(default=None, ge=2, description="held-out samples; default: the suite's")
    seq_len: int | None = Field(default=None, ge=16, description="tokens of each; default: the suite's")
    long: int | None = Field(
        default=None, ge=16, description="tokens of long documents; default: the suite's"
    )
    variants: tuple[choices.VariantName, ...] | None = Field(default=None, description="default: all")
    caches: tuple[CacheName, ...] = Field(default=(), description="types beside static FP8, or all")
    also: tuple[Source, ...] = Field(default=(), description="datasets of other text; or all built-in ones")
    backend: choices.Backend = "auto"
    attention: choices.AttentionMode = Field(default="exact", description="of an engine, simulated")
    kl_budget: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="nats; find the fewest layers in 16 bits"
    )
    tasks: tuple[Source, ...] = Field(default=(), description="of lm-eval: names, or paths of YAML files")
    task_limit: int | None = Field(default=None, ge=1, description="documents of each; default: all")
    fail_if: tuple[Annotated[str, _legal(parse_condition)], ...] = Field(
        default=(), description="conditions such as 'kl>0.02': exit status 1 if one holds"
    )

    @model_validator(mode="after")
    def _check_attention(self) -> "EvaluationRecipe":
        if self.attention == "exact":
            return self
        if self.backend == "triton":
            raise ValueError(
                f"attention '{self.attention}' is simulated in plain torch, and backend 'triton' "
                "runs kernels of ours: use backend torch or auto"
            )
        return self


class Recipe(Settings):
    """The settings of a calibration, end to end."""

    version: int = Field(default=1, ge=1, le=1)
    description: str = ""
    strategy: choices.Strategy = "tensor"
    observer: ObserverRecipe = ObserverRecipe()
    targets: choices.Targets = "kv"
    fp8_dtype: choices.FP8Name = "e4m3fn"
    headroom: Headroom | Literal["auto"] = Field(
        default=1.0, description="amax is multiplied by this; auto: so that one token in a million is clipped"
    )
    means: bool = Field(default=False, description="also collect per-channel means of K and V")
    center_keys: bool = Field(default=False, description="subtract K's mean; implies means")
    device: choices.Device = "auto"
    dtype: choices.DType = "auto"
    offload: choices.Offload = Field(default="auto", description="layerwise: one layer in memory at a time")
    max_memory: Annotated[str, _legal(parse_size)] | None = Field(
        default=None, description="resident, such as 8GiB"
    )
    save_minutes: float = Field(default=5.0, ge=0, description="how often progress is saved, for --resume")
    trust_remote_code: bool = False
    data: DataRecipe = DataRecipe()
    export: ExportRecipe = ExportRecipe()
    evaluation: EvaluationRecipe = EvaluationRecipe()

    @property
    def collects_means(self) -> bool:
        """Return whether means and extremes of every channel of K and V are collected."""
        return self.means or self.center_keys

    @model_validator(mode="after")
    def _check_combinations(self) -> "Recipe":
        is_absmax, is_channel = self.observer.name == "absmax", self.strategy == "channel"
        observer = "" if is_absmax else f"observer '{self.observer.name}'"
        channels = "strategy 'channel'" if is_channel else "center_keys" if self.center_keys else ""
        tails = "headroom 'auto'" if self.headroom == "auto" else "data.until" if self.data.until else ""
        nvfp4 = next((name for name in self.export.formats if name.endswith("-nvfp4")), None)
        if nvfp4 and not (is_absmax and self.fp8_dtype == "e4m3fn"):
            raise ValueError(
                f"format '{nvfp4}' is made from absmax, which other observers and FP8 types replace; "
                "use observer absmax and fp8_dtype e4m3fn"
            )
        if tails and (channels or observer):
            raise ValueError(
                f"{tails} is told by the largest values of each head, which say nothing of "
                f"{channels or observer}: use strategy tensor or attn_head and observer absmax, without "
                "center_keys"
            )
        if channels and observer:
            raise ValueError(
                f"{channels} keeps no histogram per channel, so {observer} cannot serve it; "
                "use observer absmax"
            )
        return self


def recipe_names() -> list[str]:
    """Return the names of the bundled recipes, sorted."""
    return sorted(path.stem for path in _bundled_recipes().glob("*.yaml"))


def _bundled_recipes() -> Path:
    # in a checkout they lie beside the package
    package = Path(__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.with_name("recipes")


def recipe_text(name: str) -> str:
    """Return the YAML text of a bundled recipe; InputError if no recipe has that name."""
    if name not in recipe_names():
        raise InputError(
            f"no recipe named '{name}'{did_you_mean(name, recipe_names(), most=3)}; "
            f"bundled: {', '.join(recipe_names())}; or give a YAML file"
        )
    return (_bundled_recipes() / f"{name}.yaml").read_text()


@check_arguments
def load_recipe(source: str | os.PathLike[str] | None, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe by its bundled name or from a file, then apply `overrides`.

    A file is YAML or a saved `fp8kv_calibration.json`; None is the default recipe. Overrides have
    dotted keys, as in `{"data.samples": 64}`. An unknown key or a bad value is an InputError.
    """
    source = source if source is None else str(source)
    document = {} if source is None else _read_recipe(source)
    for key, value in (overrides or {}).items():
        _set(document, key, value)
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        raise InputError(explain(source, error, Recipe)) from None


def _read_recipe(source: str) -> dict[str, Any]:
    path = to_path(source)
    is_file = path.suffix in {".yaml", ".yml", ".json"} or path.exists()
    try:
        text = path.read_text() if is_file else recipe_text(source)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read recipe '{source}': {error}") from None
    document = read_yaml(text, f"recipe '{source}'")
    if isinstance(document, dict) and path.name == "fp8kv_calibration.json":
        if not (document := document.get("recipe")):
            raise InputError(f"'{source}' has no recipe; give the file of another calibration, or a recipe")
    elif isinstance(document, dict) and "recipe" in document:
        raise InputError(
            f"'{source}' is a report, whose recipe has the evaluation's own samples and observer; give your "
            "recipe, or the fp8kv_calibration.json of a calibration"
        )
    if not isinstance(document, dict):
        raise InputError(f"recipe '{source}' must be a mapping of keys to values; see `fp8kv recipes`")
    return document


def _set(document: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for parent in parents:
        child = document.setdefault(parent, {})
        if not isinstance(child, dict):
            raise InputError(f"'{dotted}' cannot be set: '{parent}' is not a mapping in the recipe")
        document = child
    document[leaf] = value
