"""Headless Chromium, and the screen that it pretends to have."""

import json
import shutil
from contextlib import contextmanager

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
REASON = "needs Debian's packages chromium and chromium-driver: nothing else opens pages"
needs_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=REASON)
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
FLAGS += "--disable-background-networking --disable-component-update --disable-dev-shm-usage"


@contextmanager
def browser(profile):
    """Chromium under selenium, which keeps what pages ask for in its log `performance`."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def look(driver, *, width=1200, media="screen", scheme="light"):
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def asked_for(driver, origin):
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    # on a slow machine the browser's own first page may still be asking
    return {each["request"]["url"] for each in asked if each["documentURL"].startswith(origin)}
