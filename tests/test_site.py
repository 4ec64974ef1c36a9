"""The documentation's site: it builds without a warning, and is looked at in a browser."""

import functools
import http.server
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from browser import asked_for, browser, look, needs_browser

from calib.commands.app import app

ROOT = Path(__file__).parent.parent
# code in the shell, in Python; pictures and tables; a page of mkdocstrings
LOOKED_AT = ("", "explanation/what-fp8-does/", "howto/how-much-text/", "reference/python/")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(directory)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return directory


def test_every_page_is_in_the_navigation(site):
    pages = {file.parent.relative_to(site).as_posix() for file in site.rglob("index.html")}
    named = {address(path) for path in leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text()))}
    assert named == pages


def leaves(config):
    waiting, found = [*config["nav"]], []
    for each in waiting:
        ((_, value),) = each.items()
        waiting += value if isinstance(value, list) else []
        found += [value] if isinstance(value, str) else []
    return found


def address(path):
    page = Path(path)
    return (page.parent if page.stem in ("index", "README") else page.with_suffix("")).as_posix()


def test_reference_pages_name_everything(site):
    import calib
    import fp8kv_runtime
    from calib.recipe import DataRecipe, Recipe

    commands = {f"fp8kv {command.name}" for command in app.registered_commands if command.name}
    assert {"fp8kv eval"} <= commands
    names = [f"{p.__name__}.{name}" for p in (calib, fp8kv_runtime) for name in p.__all__]
    keys = [*Recipe.model_fields, *DataRecipe.model_fields]
    for page, wanted in (
        ("cli", [*commands, "fp8kv verify", "--center-keys", "--tensor-parallel-size"]),
        ("python", names),
        ("recipe", [f"<code>{key}</code>" for key in keys]),
        ("report", ["<code>exceedance</code>", "Garwood"]),
        ("models", ["<code>llama</code>", "<code>Qwen3ForCausalLM</code>", "<code>hy_v4</code>"]),
    ):
        text = (site / "reference" / page / "index.html").read_text()
        assert [each for each in wanted if each not in text] == []


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def origin(site):
    """The address under which `python -m http.server` would show the site."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as driver:
        driver.set_script_timeout(300)
        yield driver


@pytest.fixture(scope="module")
def axe():
    import axe_core_python

    return (Path(axe_core_python.__file__).parent / "axe.min.js").read_text()


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", LOOKED_AT)
def test_a_page_is_accessible(driver, origin, axe, page, scheme):
    look(driver, scheme=scheme)
    driver.get(origin + page)
    shown = driver.execute_script("return document.body.dataset.mdColorScheme")
    assert shown == {"light": "default", "dark": "slate"}[scheme]
    driver.execute_script(axe)
    found = driver.execute_async_script("const done = arguments[0]; axe.run().then(r => done(r.violations))")
    told = [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found]
    assert told == []


@needs_browser
def test_no_page_scrolls_sideways_on_a_phone(driver, origin, site):
    look(driver, width=375)
    wide = []
    for file in site.rglob("index.html"):
        driver.get(origin + file.parent.relative_to(site).as_posix())
        width = driver.execute_script("return document.documentElement.scrollWidth")
        wide += [(file.parent.name, width)] if width > 375 else []
    assert wide == []


@needs_browser
def test_search_finds_a_word(driver, origin):
    look(driver)
    driver.get(origin)
    field = driver.find_element("css selector", ".md-search__input")
    driver.execute_script("document.querySelector('#__search').checked = true")
    field.send_keys("saturates")
    # results are drawn again as they come: no element is held from one look to the next
    links = "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
    found = until(lambda: [a for a in driver.execute_script(links) if "what-fp8-does" in a])
    assert found


def until(look_for, seconds=20):
    end = time.monotonic() + seconds
    while not (found := look_for()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


@needs_browser
def test_nothing_comes_from_another_server(driver, origin):
    driver.get_log("performance")
    driver.get(origin)
    driver.get(f"{origin}reference/python/")
    asked = asked_for(driver, origin)
    assert f"{origin}reference/python/" in asked
    assert [url for url in asked if not url.startswith((origin, "data:"))] == []
