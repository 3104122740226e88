"""Headless Chromium for tests of pages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import IN_CI


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    """A headless Chromium; without one a skip with the reason, in CI a failure."""
    selenium = pytest.importorskip("selenium.webdriver")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        if IN_CI:
            pytest.fail("CI needs chromium and chromium-driver")
        pytest.skip("no chromium or no chromedriver on the path")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = selenium.ChromeService(chromedriver)
    browser = selenium.Chrome(options=options, service=service)
    yield browser
    browser.quit()


def emulate(driver: Any, scheme: str) -> None:
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )


def screen(driver: Any, width: int) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def brightness(driver: Any, selector: str, style: str) -> float:
    """Mean of the colour channels that an element is drawn with, 0 to 255."""
    colour = driver.execute_script(
        "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", selector, style
    )
    return sum(float(part) for part in colour.partition("(")[2].rstrip(")").split(",")[:3]) / 3


def requested(driver: Any) -> set[str]:
    """Addresses that were asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
