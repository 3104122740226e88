"""The page of `blend-client ask --html`: what it says, what it escapes, and how it looks in Chromium."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from blend.types import Answer, ChunkReport, Comparison, Report, Timings
from blend_server.client import Client, main
from blend_server.client.explain import Explained, page
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.server import BlendServer
from tests.browser import brightness, driver, emulate, requested, screen
from tests.eval.report.test_page import Page

__all__ = ["driver"]  # a fixture

HOSTILE = "</span><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}\x00\u202e"
SHOWN = "</span><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}U+0000U+202E"


def explained(text: str = "tide", **changes: Any) -> Explained:
    """A prompt of 4 + 6 + 5 + 3 + 4 tokens: template, a hit, a miss, an unused chunk, the question."""
    kinds = ((pb.SEGMENT_KIND_TEXT, 4), *[(pb.SEGMENT_KIND_CHUNK, n) for n in (6, 5, 3)], (pb.SEGMENT_KIND_TEXT, 4))
    prompt = pb.PromptTokens()
    for kind, tokens in kinds:
        prompt.segments.add(kind=kind, start=len(prompt.texts), tokens=tokens)
        prompt.texts.extend([f"{text}{n}\n" for n in range(tokens - 1)] + [""])
    chunks = (
        ChunkReport("k1", 4, 6, "hit", "host", "plain", 3 << 20),
        ChunkReport("k2", 10, 5, "miss", reason=f"not stored {text}"),
        ChunkReport("k3", 15, 3, "unused", reason="the plan"),
    )
    report = Report(
        mode="query",
        reason=f"as asked {text}",
        tokens=22,
        cached=6,
        mandatory=16,
        selected=2,
        requested_ratio=0.3,
        selected_ratio=0.333,
        charged_ratio=0.345,
        chunks=chunks,
        timings=Timings(1.0, 2.0, 30.0, 4.0, 50.0, 600.0, 800.0),
        full_estimate_ms=2400.0,
        warnings=(f"slow {text}",),
        recomputed_positions=(0, 1, 2, 3, 5, 7, *range(10, 22)),
    )
    passages = [pb.Passage(document_id=f"{text}.md", title=text, ordinal=n, score=0.5, tokens=5) for n in range(3)]
    answer = Answer(f"High {text}.", (1, 2), "stop", replace(report, **changes))
    return Explained(
        f"When is {text}?", pb.Passages(passages=passages, retrieve_ms=20), prompt, answer, f"model {text}"
    )


def test_every_token_has_its_state_and_the_legend_counts_them() -> None:
    shown = Page(page(explained()))
    tokens = [attributes for attributes in shown.all("span") if attributes.get("role") == "option"]
    states = [token["data-state"] for token in tokens]
    hit = ["cached", "recomputed", "cached", "recomputed", "cached", "cached"]
    assert states == ["mandatory"] * 4 + hit + ["missed"] * 5 + ["unused"] * 3 + ["mandatory"] * 4
    for state, count in Counter(states).items():
        assert f"{state} {count}: " in shown.text
    chunks = [attributes["aria-label"] for attributes in shown.all("div") if "chunk" in (attributes.get("class") or "")]
    assert chunks == ["chunk 1: tide.md #0, host", "chunk 2: tide.md #1, miss", "chunk 3: tide.md #2, unused"]


def test_the_figures_of_the_report_are_there() -> None:
    text = Page(page(explained())).text
    for figure in (
        "TTFT 800 ms",
        "full prefill 2.40 s estimated",
        "speed-up 3.00 ×",
        "cached 6 of 22 tokens; 16 mandatory",
        "charged 0.345 of the cached tokens; 0.300 asked for, 0.333 selected",
        "Method query (as asked tide); 3 chunks: 1 from host (3.0 MiB), 1 miss, 1 unused.",
        "Warning: slow tide",
        "not stored tide",
        "model tide",
        "High tide.",
    ):
        assert figure in text
    assert "KL" not in text
    measured = Page(page(explained(comparison=Comparison(2000.0, 0.1234, False)))).text
    assert "full prefill 2.00 s measured" in measured
    assert "first-token KL 0.1234 nats; another most likely token" in measured


def test_the_time_to_first_token_falls_one_after_another() -> None:
    shown = Page(page(explained()))
    bars = [attributes["style"] or "" for attributes in shown.all("div") if attributes.get("class") == "bar"]
    places = [tuple(float(part.split(":")[1].strip(" %")) for part in bar.split(";")) for bar in bars]
    *steps, whole, full = places
    assert len(steps) == 8
    for (start, width), (following, _) in pairwise(steps):
        assert following == pytest.approx(start + width, abs=0.02)
    assert steps[-1][0] + steps[-1][1] == pytest.approx(whole[1], abs=0.02)
    assert whole == (0.0, pytest.approx(100 / 3, abs=0.01))
    assert full == (0.0, 100.0)
    names = ("retrieve", "queue", "lookup", "fetch", "rotate", "select", "recompute", "first token", "TTFT")
    at = [shown.text.index(f" {name} ", shown.text.index(" when ")) for name in names]
    assert at == sorted(at)


def test_steps_that_take_longer_than_the_whole_stay_on_the_page() -> None:
    shown = Page(page(explained(timings=Timings(recompute=5000.0, first_token=1000.0), full_estimate_ms=0.0)))
    bars = [attributes["style"] or "" for attributes in shown.all("div") if attributes.get("class") == "bar"]
    assert len(bars) == 9
    assert "full prefill" not in shown.text


def test_whatever_comes_from_elsewhere_stays_text() -> None:
    html = page(explained(HOSTILE))
    shown = Page(html)
    assert len(shown.all("script")) == 1
    assert shown.all("img") == []
    assert not any(name.startswith("on") for _, attributes in shown.elements for name in attributes)
    assert "\x00" not in html and "\u202e" not in html and "49" not in shown.text
    assert sum(SHOWN in text for text in shown.texts) >= 17 + 10


def test_the_page_asks_for_nothing() -> None:
    html = page(explained())
    shown = Page(html)
    for tag in ("link", "img", "iframe", "object", "embed", "base"):
        assert shown.all(tag) == []
    assert "http:" not in html and "https:" not in html and "@import" not in html and "url(" not in html
    ids = Counter(attributes["id"] for _, attributes in shown.elements if "id" in attributes)
    assert set(ids.values()) == {1}
    assert all(attributes.get("scope") in ("col", "row") for attributes in shown.all("th"))


# ------------------------------------------------------------------------------------------- the command


def test_the_command_writes_a_page_of_a_real_answer(
    client: Client, tiny_server: BlendServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = tmp_path / "note.md"
    note.write_text("The pier <script>alert(1)</script> costs 5 €. Höchster Stand: 3 m. 港\n", "utf-8")
    assert main(["ingest", str(note), "--address", tiny_server.address]) == 0
    capsys.readouterr()
    target = tmp_path / "answer.html"
    flags = ["--method", "query", "--ratio", "0.5", "--compare-full", "--html", str(target)]
    assert main(["ask", "What does the pier cost?", *flags, "--details", "--address", tiny_server.address]) == 0
    captured = capsys.readouterr()
    assert f"page: {target}" in captured.err
    assert "\npositions " not in captured.out, "they were not asked for"

    report = client.ask("What does the pier cost?", plan=_plan(flags), positions=True).report
    html = target.read_text("utf-8")
    shown = Page(html)
    assert len(shown.all("script")) == 1
    options = [attributes for attributes in shown.all("span") if attributes.get("role") == "option"]
    states = Counter(attributes["data-state"] for attributes in options)
    assert states == {
        "cached": report.cached - report.selected,
        "recomputed": report.selected,
        "mandatory": report.mandatory,
    }
    texts = html.partition('<div class="tokens"')[2]
    assert ">€</span>" in texts and ">港</span>" in texts and "\ufffd" not in texts
    assert "&lt;|start|&gt;" in texts, "control tokens as they are written"
    assert "first-token KL" in shown.text


def _plan(flags: list[str]) -> Any:
    from blend.types import Plan

    return Plan(flags[1], float(flags[3]))


@pytest.mark.parametrize("name", ["missing/answer.html", "."])
def test_a_page_that_cannot_be_written_is_told_before_anything_is_asked(
    name: str, client: Client, tiny_server: BlendServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / name)
    assert main(["ask", "When?", "--html", path, "--address", tiny_server.address]) == 2
    assert "html: got" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- in a browser


@pytest.fixture
def shown(driver: Any, tmp_path: Path) -> Iterator[Any]:
    """The page with hostile texts, in light colours; no test may leave an error in the console."""
    path = tmp_path / "page.html"
    path.write_text(page(explained(HOSTILE)), "utf-8")
    requested(driver)
    emulate(driver, "light")
    driver.get(path.as_uri())  # an alert would fail the next command
    yield driver
    assert driver.get_log("browser") == []


@pytest.mark.slow
def test_it_loads_in_silence_and_fits_any_screen(shown: Any) -> None:
    assert requested(shown) <= {shown.current_url}
    assert shown.execute_script("return document.images.length") == 0
    for width in (360, 390, 1280):
        screen(shown, width)
        assert shown.execute_script("return document.documentElement.scrollWidth") <= width
    widths = shown.execute_script(
        "return [...document.querySelectorAll('.bar')].map((bar) => bar.getBoundingClientRect().width)"
    )
    assert len(widths) == 10 and all(width > 0 for width in widths)


@pytest.mark.slow
def test_it_is_light_and_dark(shown: Any) -> None:
    for scheme, dark in (("light", False), ("dark", True)):
        emulate(shown, scheme)
        ground = brightness(shown, "body", "backgroundColor")
        assert (ground < 128) == dark
        assert abs(ground - brightness(shown, ".tokens [data-state]", "color")) > 150


@pytest.mark.slow
def test_a_token_says_what_it_is(shown: Any) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    shown.execute_script("document.querySelector('.tokens [tabindex=\"0\"]').focus()")

    def after(key: str) -> str:
        shown.switch_to.active_element.send_keys(key)
        return str(shown.find_element(By.CSS_SELECTOR, ".map output").text)

    said = after(Keys.ARROW_DOWN)
    assert "cached" in said and "chunk 1" in said and "token 5 of 22" in said and "score" not in said
    assert "part of the next token's character" in after(Keys.END)
