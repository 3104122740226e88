"""The report page in headless Chromium."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blend.eval.report import render
from tests.browser import brightness, driver, emulate, requested, screen
from tests.eval.report import documents

__all__ = ["driver"]  # a fixture

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "page.html"
    path.write_text(render([documents.run(), documents.robustness(), documents.perf()]), "utf-8")
    return path.as_uri()


@pytest.fixture
def page(driver: Any, address: str) -> Iterator[Any]:
    """The page, freshly loaded on a desktop screen in light colours; no test may leave an error in the console."""
    emulate(driver, "light")
    screen(driver, 1280)
    driver.get(address)
    yield driver
    assert driver.get_log("browser") == []


def test_it_loads_in_silence_and_asks_for_nothing(page: Any, address: str) -> None:
    assert requested(page) <= {address}


def test_every_plot_is_drawn(page: Any) -> None:
    sizes = page.execute_script(
        """document.querySelectorAll("details").forEach((folded) => { folded.open = true; });
        return [...document.querySelectorAll("figure svg")].map((svg) => {
          const box = svg.getBoundingClientRect(), drawn = svg.getBBox();
          return [box.width, box.height, drawn.width, drawn.height, svg.querySelectorAll("path").length];
        });"""
    )
    assert len(sizes) > 25
    assert all(width > 200 and height > 60 and w > 100 and h > 50 and n > 5 for width, height, w, h, n in sizes)


def test_pointing_at_a_token_shows_its_text_and_score(page: Any) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    found = documents.run().heatmap
    assert found is not None
    at = found.state.index("chosen")
    token = page.find_elements(By.CSS_SELECTOR, ".tokens [data-state]")[at]
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", token)
    ActionChains(page).move_to_element(token).perform()
    said = page.find_element(By.CSS_SELECTOR, ".map output").text
    assert json.dumps(found.tokens[at]) in said and "chosen" in said and "chunk 1" in said
    assert f"{found.scores[at]:.4g}" in said


def test_the_keyboard_goes_from_token_to_token(page: Any) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    found = documents.run().heatmap
    assert found is not None
    page.execute_script("document.querySelector('.tokens [tabindex=\"0\"]').focus()")

    def after(key: str) -> str:
        page.switch_to.active_element.send_keys(key)
        return str(page.find_element(By.CSS_SELECTOR, ".map output").text)

    assert f"token 2 of {len(found.tokens)}" in after(Keys.ARROW_RIGHT)
    assert "token 9 of" in after(Keys.ARROW_DOWN), "the first chunk begins there"
    assert "token 8 of" in after(Keys.ARROW_LEFT)
    assert "token 1 of" in after(Keys.ARROW_UP)
    assert f"token {len(found.tokens)} of" in after(Keys.END)
    assert f"token {len(found.tokens)} of" in after(Keys.ARROW_RIGHT)
    assert "token 1 of" in after(Keys.HOME)


def test_dark_and_light_follow_the_system_and_the_button(page: Any) -> None:
    from selenium.webdriver.common.by import By

    def is_dark() -> bool:
        ground, ink = brightness(page, "body", "backgroundColor"), brightness(page, "svg text", "fill")
        assert abs(ground - ink) > 150, "letters of plots stand out"
        return ground < 128

    button = page.find_element(By.ID, "theme")
    assert not is_dark()
    button.click()
    assert is_dark() and button.text == "Light colours"
    button.click()
    assert not is_dark()
    page.refresh()
    emulate(page, "dark")
    assert is_dark()
    page.find_element(By.ID, "theme").click()
    assert not is_dark()


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_but_tables_is_wider_than_the_screen(width: int, page: Any) -> None:
    screen(page, width)
    assert page.execute_script("return document.documentElement.scrollWidth") <= width


def test_a_script_in_the_results_does_not_run(driver: Any, tmp_path: Path) -> None:
    from tests.eval.report.test_page import hostile

    path = tmp_path / "hostile.html"
    path.write_text(render([hostile()]), "utf-8")
    driver.get(path.as_uri())  # an alert would fail the next command
    assert driver.execute_script("return document.images.length") == 0
    assert driver.get_log("browser") == []
