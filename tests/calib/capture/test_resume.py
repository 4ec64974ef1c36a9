"""Progress is saved whole or not at all, and fits only the run that it is of."""

import pytest
import torch
from families import LATENT, tiny_model

from calib.capture.attention import map_attention
from calib.capture.loop import calibrate
from calib.capture.resume import SavedProgress, Share, progress_file, remove_progress
from calib.data import make_batches
from calib.errors import InputError
from calib.recipe import load_recipe
from calib.scales.stats import STATISTICS
from calib.scales.stats_file import save_stats

SAMPLES = [list(range(3 + i, 40 + i)) for i in range(6)]
RECIPE = load_recipe(None, {"means": True, "targets": "qkv", "observer.name": "mse"})
FAMILIES = ["llama", "deepseek_v3"]
RUN = {"model": "m", "recipe": {"seed": 1}}


BATCHES = make_batches(SAMPLES, 1, pad_id=0)


def measured(batches, family="llama"):
    model = tiny_model(family, **LATENT.get(family, {}))
    return calibrate(model, batches, RECIPE)


def same(one, other):
    fields = tuple(STATISTICS)  # of K and V; of Q two
    tensors = [
        (getattr(getattr(a, which), field), getattr(getattr(b, which), field))
        for a, b in zip(one.layers.values(), other.layers.values(), strict=True)
        for which in "kvq"
        for field in fields
    ]
    assert sum(a is not None for a, _ in tensors) == 3 * (2 * len(fields) + 2)
    return one.tokens == other.tokens and all(
        (a is None and b is None) or torch.equal(a, b) for a, b in tensors
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_add_up_to_the_same_bits_in_any_order(family):
    whole = measured(BATCHES, family)
    parts = [measured([batch], family) for batch in BATCHES]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 0, 2]):
        merged = parts[order[0]]
        for i in order[1:]:
            merged = merged.merge(parts[i])
        assert same(merged, whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_saved_goes_on(family, tmp_path):
    path = progress_file(tmp_path / "out", 0)
    saved = SavedProgress(path, RUN, every_seconds=0)
    assert saved.load() == (None, 0)
    first = measured(BATCHES[:4], family)
    saved.save_sometimes(lambda: first, 4)
    found, batches = SavedProgress(path, RUN, every_seconds=0).load()
    assert batches == 4
    assert same(found.merge(measured(BATCHES[4:], family)), measured(BATCHES, family))
    assert found.latent == (family in LATENT)
    assert [file.name for file in tmp_path.iterdir()] == [".out.rank0.progress"]
    remove_progress(path)
    assert [*tmp_path.iterdir()] == []


def test_nothing_is_saved_before_its_time(tmp_path):
    path = progress_file(tmp_path / "out", 3)
    saved = SavedProgress(path, RUN, every_seconds=3600)
    saved.save_sometimes(lambda: pytest.fail("statistics were taken"), 1)
    assert not path.exists()


@pytest.mark.parametrize(
    ("change", "named"), [({"model": "n"}, "model"), ({"recipe": {"seed": 2}}, "recipe")]
)
def test_another_run_does_not_go_on(change, named, tmp_path):
    path = progress_file(tmp_path / "out", 0)
    SavedProgress(path, RUN, every_seconds=0).save_sometimes(lambda: measured(BATCHES[:1]), 1)
    with pytest.raises(InputError, match=f"another {named}, so --resume cannot go on") as caught:
        SavedProgress(path, {**RUN, **change}, every_seconds=0).load()
    assert "\n" not in str(caught.value)


def test_a_file_cut_short_is_refused(tmp_path):
    path = progress_file(tmp_path / "out", 0)
    SavedProgress(path, RUN, every_seconds=0).save_sometimes(lambda: measured(BATCHES[:1]), 1)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot read statistics"):
        SavedProgress(path, RUN, every_seconds=0).load()
    save_stats(measured(BATCHES[:1]), path)  # statistics, but no progress
    with pytest.raises(InputError, match="another model"):
        SavedProgress(path, RUN, every_seconds=0).load()


def test_progress_beyond_the_last_batch_is_refused(tmp_path):
    saved = SavedProgress(progress_file(tmp_path / "out", 0), RUN, every_seconds=0)
    saved.save_sometimes(lambda: measured(BATCHES[:1]), 7)
    model = tiny_model("llama")
    with pytest.raises(InputError, match="covers 7 batches of 6; it is damaged"):
        Share(model, BATCHES, RECIPE, map_attention(model), saved, resume=True)
