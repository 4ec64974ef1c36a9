"""`~name` of a user that does not exist is one line, wherever a path is given; caches take it as it is."""

import pytest
from command_line import fp8kv, one_line_error
from families import save_model, tiny_model

from calib.data.loading import dataset_key
from calib.errors import InputError
from calib.files.cache_folder import cache_folder
from calib.formats.directory import local_directory
from calib.transfer.hidden_paths import _spellings

NOWHERE = "~nobody-of-this-name/x"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_model(tiny_model("llama"), tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize(
    "command",
    [
        "calibrate ~ -o {out}",
        "calibrate {model} -o {out} --dataset ~",
        "apply ~ {model} -o {out}",
        "bench ~",
        "generate {model} hello --scales ~",
        "eval {model} -o {out} --tasks ~.yaml",
    ],
)
def test_commands(command, directory, tmp_path):
    words = command.replace("~", NOWHERE).format(model=directory, out=tmp_path / "out").split()
    one_line_error(fp8kv(*words), f"'{NOWHERE}", "this user has no home folder; give a full path")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("function", [dataset_key, local_directory])
def test_functions(function):
    with pytest.raises(InputError, match="this user has no home folder"):
        function(NOWHERE)


def test_what_is_no_path_of_the_user_stays_as_it_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", NOWHERE)
    assert cache_folder("HF_HUB_CACHE") == tmp_path / NOWHERE
    assert _spellings(NOWHERE) == [NOWHERE]
