"""Rows of a dataset on the Hugging Face Hub, streamed; its errors explained in one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager

from calib.data.samples import Row
from calib.errors import InputError, one_line
from calib.files.cache_folder import cache_refusal
from calib.recipe import DataRecipe

PREFERRED_SPLITS = ("train_sft", "train", "validation", "test")
# about one parquet row group, which has to be fetched anyway
SHUFFLE_BUFFER = 1000
# datasets turns some failed downloads into a FileNotFoundError that quotes this type
QUOTED_FAILURE = "LocalEntryNotFoundError"


def find_split(recipe: DataRecipe) -> str:
    """Return the split to read: `recipe.split`, or the one for training, or evaluation; refuse others."""
    import datasets

    with _errors_explained(recipe.dataset):
        splits = list(datasets.get_dataset_split_names(recipe.dataset, recipe.config))
    candidates = PREFERRED_SPLITS if recipe.split is None else (recipe.split,)
    if split := next((name for name in candidates if name in splits), None):
        return split
    problem = f"no split '{recipe.split}' in" if recipe.split else "cannot choose a split of"
    raise InputError(
        f"{problem} dataset '{recipe.dataset}'; splits: {', '.join(splits)}; "
        f"choose one with `--set data.split=NAME`"
    )


def stream_rows(recipe: DataRecipe, split: str) -> Iterator[Row]:
    """Yield the rows of `split` in a shuffled order that depends on the seed alone."""
    import datasets

    with _errors_explained(recipe.dataset):
        rows = datasets.load_dataset(recipe.dataset, recipe.config, split=split, streaming=True)
        if (recipe.images or recipe.audio) and rows.features:
            rows = rows.decode(False)  # pictures and sound stay the bytes that they are
        yield from rows.shuffle(seed=recipe.seed, buffer_size=SHUFFLE_BUFFER)


def is_unreachable(error: Exception) -> bool:
    """Return whether `error`, of datasets or huggingface_hub, means that the Hub does not answer."""
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError

    unreachable = ConnectionError, TimeoutError, HTTPError, LocalEntryNotFoundError
    return QUOTED_FAILURE in one_line(error) or _has_cause(error, *unreachable)


@contextmanager
def _errors_explained(dataset: str) -> Iterator[None]:
    from datasets.exceptions import DatasetsError

    # the httpx that huggingface_hub itself uses: `httpx` in 1.x, `httpx2` in 2.x
    from huggingface_hub.errors import HTTPError

    try:
        yield
    # RuntimeError: the dataset is a loading script
    except (OSError, HTTPError, DatasetsError, ValueError, RuntimeError) as error:
        raise InputError(cache_refusal(error, "HF_HUB_CACHE") or _explain(dataset, error)) from error


def _explain(dataset: str, error: Exception) -> str:
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    message = one_line(error)
    # datasets turns a GatedRepoError into a DatasetNotFoundError that says so in its text only
    if _has_cause(error, GatedRepoError) or "is a gated dataset" in message:
        return (
            f"dataset '{dataset}' is gated: accept its terms on https://huggingface.co/datasets/{dataset} "
            "and run `hf auth login`, or use an open dataset"
        )
    # datasets looks for files where a name has too many slashes for the Hub
    no_file = message.startswith("Couldn't find any data file") and QUOTED_FAILURE not in message
    if no_file or _has_cause(error, DatasetNotFoundError, RepositoryNotFoundError, HFValidationError):
        return (
            f"no dataset '{dataset}' on the Hugging Face Hub, or it is private: check the name, "
            f"give the path of a local file, or use `--dataset builtin:python-docs`"
        )
    if is_unreachable(error):
        return (
            f"the Hugging Face Hub cannot be reached for dataset '{dataset}' ({message}); "
            f"with no network use `--dataset builtin:python-docs` or a local file"
        )
    if message.startswith(("BuilderConfig ", "Config name is missing")):
        message = message.split(" Example of usage")[0]
        return f"dataset '{dataset}': {message}; choose one with `--set data.config=NAME`"
    return f"dataset '{dataset}' cannot be read: {message}; use another dataset or a local file"


def _has_cause(error: BaseException | None, *kinds: type[BaseException]) -> bool:
    while error is not None and not isinstance(error, kinds):
        error = error.__cause__
    return error is not None
