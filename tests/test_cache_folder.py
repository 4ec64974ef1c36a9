"""A cache that cannot be written: the message names the variable that moves it, no output."""

import errno
from functools import partial

import datasets
import pytest
import typer
from command_line import fp8kv, one_line_error
from fake_hub import on, running_hub
from triton.runtime.cache import FileCacheManager
from tune_kernels import write_table

from calib.commands.running import run
from calib.data import hub_rows
from calib.errors import InputError
from calib.files.cache_folder import cache_refusal
from calib.models.sources import download_config
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.kernels.tuning import read_table, tuned_path

FOLDERS = {
    "XDG_CACHE_HOME": ".cache",
    "HF_HOME": ".cache/huggingface",
    "HF_HUB_CACHE": ".cache/huggingface/hub",
    "HF_DATASETS_CACHE": ".cache/huggingface/datasets",
    "HF_MODULES_CACHE": ".cache/huggingface/modules",
    "TRITON_CACHE_DIR": ".triton/cache",
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for variable in FOLDERS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_folder(home):
    """A file, in which not even root can make one."""
    (home / "file").touch()
    return home / "file"


def refusal(variable):
    return f"set {variable} to a folder that you can write"


def denied(path):
    return cache_refusal(PermissionError(errno.EACCES, "Permission denied", str(path)))


def test_the_built_in_model(no_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_folder))
    done = fp8kv("calibrate", "builtin:smollm2", "--dataset", "random", "-o", tmp_path / "out")
    one_line_error(done, refusal("XDG_CACHE_HOME"), f"'{no_folder}/fp8kv", "Not a directory")
    assert "output" not in done.stderr


def test_what_the_hub_gives(no_folder, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(no_folder))
    with running_hub() as hub, on(hub, no_folder, monkeypatch):
        hub.put("me/model", {"config.json": b"{}"})
        with pytest.raises(InputError, match=f"'{no_folder}.*{refusal('HF_HUB_CACHE')}"):
            download_config("me/model")


def test_datasets(no_folder, monkeypatch, home):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(no_folder))
    (home / "a.jsonl").write_text('{"text": "a"}\n')
    load = partial(datasets.load_dataset, "json", data_files=str(home / "a.jsonl"), cache_dir=str(no_folder))
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_: load())
    with pytest.raises(InputError, match=refusal("HF_DATASETS_CACHE")):
        hub_rows.find_split(hub_rows.DataRecipe(dataset="me/data"))


def test_compiled_kernels_but_no_other_folder(no_folder, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(no_folder / "triton"))
    with pytest.raises(typer.Exit) as ended:
        run(lambda: FileCacheManager("0" * 64))
    assert ended.value.exit_code == 2
    assert refusal("TRITON_CACHE_DIR") in capsys.readouterr().err
    with pytest.raises(NotADirectoryError):
        run((no_folder / "folder").mkdir)


def test_each_folder_has_its_variable_and_one_that_is_set_goes_first(home, monkeypatch):
    elsewhere = home / "elsewhere"
    for variable, default in FOLDERS.items():
        assert refusal(variable) in denied(home / default / "made-here")
        with monkeypatch.context() as patch:
            patch.setenv(variable, str(elsewhere))
            assert refusal(variable) in denied(elsewhere / "made-here")
    monkeypatch.setenv("HF_HOME", str(elsewhere))
    for part in ("hub", "datasets", "modules"):
        assert refusal("HF_HOME") in denied(elsewhere / part)
    monkeypatch.setenv("HF_HUB_CACHE", str(elsewhere / "hub"))
    assert refusal("HF_HUB_CACHE") in denied(elsewhere / "hub")
    # a full disk has no file name, but belongs to the cache that was written
    full = OSError(errno.ENOSPC, "No space left on device")
    assert "No space left on device); set HF_HUB_CACHE" in cache_refusal(full, "HF_HUB_CACHE")
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first  # a circle comes to an end
    assert cache_refusal(full) is cache_refusal(first) is None


def test_the_table_of_configs(no_folder, monkeypatch):
    monkeypatch.setenv("FP8KV_TUNING", str(no_folder / "tuning.json"))
    assert read_table(tuned_path()) == {}
    with pytest.raises(AttentionError, match="File exists; set FP8KV_TUNING to another file"):
        write_table(tuned_path(), {})
    monkeypatch.setenv("FP8KV_TUNING", str(no_folder.parent))
    with pytest.raises(AttentionError, match="Is a directory; set FP8KV_TUNING to another file"):
        read_table(tuned_path())
