"""The documentation's site: it builds without a warning, and is looked at in a browser."""

import mimetypes
import os
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import pytest
import yaml
from browser import asked_for, browser, look, needs_browser
from fake_server import web_server

import calib
import fp8kv_runtime
from calib.commands.app import app
from calib.recipe import DataRecipe, Recipe

ROOT = Path(__file__).parent.parent
# code in the shell, in Python; pictures and tables; a page of mkdocstrings
LOOKED_AT = ("", "explanation/what-fp8-does/", "howto/how-much-text/", "reference/python/")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(directory)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return directory


def test_every_page_is_in_the_navigation_and_reference_pages_name_everything(site):
    waiting, named = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"], set()
    for each in waiting:
        ((_, value),) = each.items()
        if isinstance(value, list):
            waiting += value
        else:
            page = Path(value)
            named.add((page.parent if page.stem in ("index", "README") else page.with_suffix("")).as_posix())
    assert named == {file.parent.relative_to(site).as_posix() for file in site.rglob("index.html")}
    commands = {f"fp8kv {command.name}" for command in app.registered_commands if command.name}
    assert {"fp8kv eval"} <= commands
    for page, wanted in (
        ("cli", [*commands, "fp8kv verify", "--center-keys", "--tensor-parallel-size"]),
        ("python", [f"{p.__name__}.{name}" for p in (calib, fp8kv_runtime) for name in p.__all__]),
        ("recipe", [f"<code>{key}</code>" for key in (*Recipe.model_fields, *DataRecipe.model_fields)]),
        ("report", ["<code>exceedance</code>", "Garwood"]),
        ("models", ["<code>llama</code>", "<code>Qwen3ForCausalLM</code>", "<code>hy_v4</code>"]),
    ):
        text = (site / "reference" / page / "index.html").read_text()
        assert [each for each in wanted if each not in text] == []


@pytest.fixture(scope="module")
def origin(site):
    """The address under which the site is shown."""

    def reply(request, body):
        file = site / request.path.partition("?")[0].strip("/")
        file = file / "index.html" if file.is_dir() else file
        status, content = (200, file.read_bytes()) if file.exists() else (404, b"")
        request.answer(status, content, {"Content-Type": mimetypes.guess_type(file)[0]})

    with web_server(reply) as url:
        yield f"{url}/"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as driver:
        driver.set_script_timeout(300)
        yield driver


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", LOOKED_AT)
def test_a_page_is_accessible(driver, origin, page, scheme):
    look(driver, scheme=scheme)
    driver.get(origin + page)
    shown = driver.execute_script("return document.body.dataset.mdColorScheme")
    assert shown == {"light": "default", "dark": "slate"}[scheme]
    driver.execute_script(resources.files("axe_core_python").joinpath("axe.min.js").read_text())
    found = driver.execute_async_script("const done = arguments[0]; axe.run().then(r => done(r.violations))")
    assert [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found] == []


@needs_browser
def test_no_page_scrolls_sideways_on_a_phone(driver, origin, site):
    look(driver, width=375)
    wide = []
    for file in site.rglob("index.html"):
        driver.get(f"{origin}{file.parent.relative_to(site).as_posix()}/")
        width = driver.execute_script("return document.documentElement.scrollWidth")
        wide += [(file.parent.name, width)] if width > 375 else []
    assert wide == []


@needs_browser
def test_search_finds_a_word_and_nothing_comes_from_another_server(driver, origin):
    look(driver)
    driver.get_log("performance")
    driver.get(origin)
    field = driver.find_element("css selector", ".md-search__input")
    driver.execute_script("document.querySelector('#__search').checked = true")
    field.send_keys("saturates")
    # results are drawn again as they come: no element is held from one look to the next
    links = "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
    end = time.monotonic() + 20
    while not any("what-fp8-does" in link for link in driver.execute_script(links)):
        assert time.monotonic() < end
        time.sleep(0.05)
    driver.get(f"{origin}reference/python/")
    asked = asked_for(driver, origin)
    assert f"{origin}reference/python/" in asked
    assert [url for url in asked if not url.startswith((origin, "data:"))] == []
