"""The report page as text: its structure, what it escapes, and what it does with results that lack something."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from blend.errors import InvalidInput
from blend.eval.report import render
from blend.eval.stats import Estimate
from blend.eval.values import Against, Heatmap, Perf, Results
from tests.eval.report import documents

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}\x00\u202e\ud800$\\frac{"
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A page's elements and texts; unbalanced tags are an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def html() -> str:
    return render([documents.run(), documents.robustness(), documents.perf()])


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_the_page_needs_nothing_from_outside(html: str, page: Page) -> None:
    for tag in ("link", "img", "iframe", "object", "embed", "base"):
        assert page.all(tag) == []
    sources = [v for _, attributes in page.elements for k, v in attributes.items() if k in ("src", "href", "action")]
    assert all(source is not None and source.startswith("#") for source in sources)
    assert "http:" not in html and "https:" not in html and "@import" not in html
    (policy,) = [m["content"] or "" for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe-inline" not in policy.partition("script-src")[2]


def test_every_id_is_there_once_and_every_reference_leads_to_one(html: str, page: Page) -> None:
    ids = Counter(attributes["id"] for _, attributes in page.elements if "id" in attributes)
    assert ids and set(ids.values()) == {1}
    names = ("href", "xlink:href", "clip-path", "aria-labelledby", "fill", "style")
    for _, attributes in page.elements:
        for name in names:
            value = attributes.get(name) or ""
            if "#" in value:
                assert value.partition("#")[2].partition(")")[0] in ids, value
            elif name == "aria-labelledby" and value:
                assert value in ids


def test_the_same_results_give_the_same_page() -> None:
    run = replace(documents.run(), rows=documents.run().rows[:4], records=())
    assert render([run]) == render([run])


@pytest.mark.parametrize(
    "title",
    [
        "Answer KL against charged ratio",
        "SQuAD F1 against TTFT",
        "What TTFT is made of",
        "SQuAD F1 by position",
        "Answer KL by chunk size",
        "Answer KL: how far orders move it",
        "Concurrency",
        "Hit rate",
        "Where chunks lie: what TTFT is made of",
        "Break-even of query 0.15",
    ],
)
def test_plots_are_there_with_their_values_in_words(title: str, page: Page) -> None:
    labels = [attributes["aria-label"] or "" for attributes in page.all("svg") if attributes.get("role") == "img"]
    assert len(labels) == len(page.all("svg"))
    (label,) = [label for label in labels if label.startswith(f"{title}. ")]
    assert "query 0.15" in label
    assert title in page.text


def test_tables_say_all_rows_differences_and_origin(page: Page) -> None:
    text = page.text
    assert "0.620 [0.580, 0.660]" in text, "a mean with its interval"
    assert "inside the noise" in text and "worse than full" in text
    assert "not shown to be within the declared margin of 0.05 of full prefill" in text
    assert "20 questions, seed 0" in text
    assert "not measured: 3 (longer than the model)" in text
    assert documents.run().command in text and documents.perf().command in text
    assert documents.IDENTITY.prompts in text and documents.ENVIRONMENT.torch in text
    assert "no calibration for this model" in text
    assert "pays against prefix" in text and "requests 500" in text, "the break-even"
    assert all(attributes.get("scope") in ("col", "row") for attributes in page.all("th"))


def test_conditions_have_a_column_where_something_was_varied() -> None:
    alone, varied = (Page(render([replace(made(), records=())])) for made in (documents.run, documents.robustness))
    assert "condition" not in alone.texts and "as given" not in alone.texts
    assert varied.texts.count("condition") == 3 and "position first" in varied.texts


def test_the_token_map_has_every_token_with_state_and_score(page: Page) -> None:
    found = documents.run().heatmap
    assert found is not None
    tokens = [attributes for attributes in page.all("span") if attributes.get("role") == "option"]
    assert [token["data-state"] for token in tokens] == list(found.state)
    for token, score in zip(tokens, found.scores, strict=True):
        assert ("data-score" in token) == (score is not None)
        if score is not None:
            assert float(token["data-score"] or "") == pytest.approx(score, rel=1e-3)
    assert [token["tabindex"] for token in tokens].count("0") == 1, "one stop of the tab key"
    chunks = [attributes for attributes in page.all("div") if "chunk" in (attributes.get("class") or "").split()]
    assert [chunk["aria-label"] for chunk in chunks] == ["chunk 1", "chunk 2", "chunk 3"]


def hostile() -> Results:
    """Results in which every text that people or data chose is an attack."""
    run = documents.run()
    heat = run.heatmap
    assert heat is not None
    row = replace(run.rows[-1], method=HOSTILE, metrics={HOSTILE: Estimate(0.5, 0.4, 0.6, 20)}, against={})
    against = Against(HOSTILE, Estimate(0.5, 0.4, 0.6, 20), 0.1, 0.1, True)
    record = replace(
        run.records[0], method=HOSTILE, condition=HOSTILE, level=HOSTILE, metrics={HOSTILE: 0.5}, warnings=(HOSTILE,)
    )
    point = replace((documents.perf().perf or Perf(())).points[0], x=HOSTILE, method=HOSTILE, detail={HOSTILE: HOSTILE})
    return replace(
        run,
        command=HOSTILE,
        settings={HOSTILE: [HOSTILE], "dataset": HOSTILE},
        identity=replace(run.identity, name=HOSTILE),
        dropped={HOSTILE: 1},
        rows=(run.rows[0], row, replace(row, ratio=0.9, condition=HOSTILE, level=HOSTILE, against={HOSTILE: against})),
        records=(record,),
        heatmap=replace(heat, question=HOSTILE, method=HOSTILE, tokens=(HOSTILE,) * len(heat.tokens)),
        perf=Perf((point,), {HOSTILE: HOSTILE}),
    )


def test_texts_from_outside_stay_texts() -> None:
    html = render([hostile()], title=HOSTILE)
    html.encode("utf-8")
    page = Page(html)
    assert page.all("img") == []
    assert len(page.all("script")) == 1
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert "\x00" not in html and "\u202e" not in html
    shown = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}U+0000U+202EU+D800$\\frac{"
    for tag in ("title", "h1", "code", "td", "span"):
        assert page.all(tag), tag
    assert page.texts.count(shown) > 180, "each token, and the other places"


def no_rows(run: Results) -> Results:
    return replace(run, rows=(), records=(), heatmap=None)


def nothing_known_of_rows(run: Results) -> Results:
    return replace(run, rows=tuple(replace(r, metrics={}, ttft_ms={}, timings={}, against={}) for r in run.rows))


def not_numbers(run: Results) -> Results:
    nan = Estimate(math.nan, math.nan, math.nan, 0)
    return replace(
        run,
        rows=tuple(
            replace(
                row,
                metrics=dict.fromkeys(row.metrics, nan),
                charged=math.nan,
                ttft_ms={"p50": math.nan, "p95": math.inf},
                timings=dict.fromkeys(row.timings, math.nan),
                against={"f1": Against("full", nan, math.nan, math.nan, True)},
            )
            for row in run.rows
        ),
        records=tuple(replace(record, metrics={"f1": math.nan}) for record in run.records),
    )


def some_not_numbers(run: Results) -> Results:
    first = replace(run.rows[0], metrics={"f1": Estimate(0.5, math.nan, math.nan, 1)}, charged=math.nan)
    return replace(run, rows=(first, *run.rows[1:]))


def enormous(run: Results) -> Results:
    beyond = Estimate(1e300, -math.inf, math.inf, 20)
    row = replace(
        run.rows[0],
        metrics={"f1": beyond},
        charged=1e300,
        ttft_ms={"p50": 1e300, "p95": math.inf},
        timings={"recompute": 1e300, "first_token": math.inf},
        against={"f1": Against("full", beyond, 0.5, 1.0, False)},
    )
    records = tuple(replace(record, metrics={"f1": -1e300}) for record in run.records)
    return replace(run, rows=(row, *run.rows[1:]), records=records)


def empty_map(run: Results) -> Results:
    return replace(run, heatmap=Heatmap("q", "query", 0.15, (), (), (), ()))


def one_question(run: Results) -> Results:
    return replace(run, questions=1)


@pytest.mark.parametrize(
    "made", [no_rows, nothing_known_of_rows, not_numbers, some_not_numbers, enormous, empty_map, one_question]
)
def test_what_is_missing_is_left_out(made: Callable[[Results], Results]) -> None:
    run = documents.run()
    varied = documents.robustness()
    rows = (*run.rows[:3], *varied.rows[:2])
    page = Page(render([made(replace(run, rows=rows, records=varied.records[:30], perf=documents.perf().perf))]))
    assert "nan" not in page.text.split() and "None" not in page.text.split()
    assert "inf" not in page.text.split() and max(map(len, page.text.split())) < 80
    assert "How this was made" in page.text


def test_few_questions_are_said_to_tell_nothing() -> None:
    assert "fewer than 6 questions (2 here)" in Page(render([replace(documents.run(), questions=2, rows=())])).text


@pytest.mark.parametrize(
    "other",
    [
        {"identity": replace(documents.IDENTITY, model="another")},
        {"identity": replace(documents.IDENTITY, dtype="bfloat16")},
        {"identity": replace(documents.IDENTITY, prompts="another")},
        {"environment": replace(documents.ENVIRONMENT, cpu="another")},
    ],
)
def test_results_that_are_not_comparable_get_sections_of_their_own(other: dict[str, object]) -> None:
    run = replace(documents.run(), rows=documents.run().rows[:3], records=())
    alone = Page(render([run]))
    page = Page(render([run, replace(run, **other)]))  # type: ignore[arg-type]
    assert [s["id"] for s in page.all("section")] == ["section-1", "section-2"]
    assert len(page.all("svg")) == 2 * len(alone.all("svg"))
    assert "not comparable" in page.text and "not comparable" not in alone.text


def colours(page: Page, title: str) -> set[str]:
    """The colours of a plot's methods; full prefill's is that of the text."""
    found: set[str] = set()
    inside = False
    for tag, attributes in page.elements:
        if tag in ("svg", "figure"):
            inside = tag == "svg" and (attributes["aria-label"] or "").startswith(f"{title}. ")
        elif inside:
            found.update(re.findall(r"--hue-\d", attributes.get("style") or ""))
    return found


def test_two_results_of_the_same_share_plots_and_are_told_apart() -> None:
    run = replace(documents.run(), rows=documents.run().rows[1:4], records=())
    page = Page(render([run, replace(run, seed=1)]))
    assert len(page.all("section")) == 1
    assert "reuse (1)" in page.text and "reuse (2)" in page.text
    for title in ("SQuAD F1 against charged ratio", "SQuAD F1 against TTFT"):
        assert len(colours(page, title)) == 2 * len(colours(Page(render([run])), title)), "in colour, too"


def test_no_results_are_refused() -> None:
    with pytest.raises(InvalidInput, match="results"):
        render([])


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"state": ("cached",)}, "state"),
        ({"scores": (0.5,)}, "scores"),
        ({"chunks": ((0, 10), (5, 20))}, "chunks"),
        ({"chunks": ((0, 10_000),)}, "chunks"),
        ({"chunks": ((10, 5),)}, "chunks"),
    ],
)
def test_an_inconsistent_token_map_is_refused(broken: dict[str, object], named: str) -> None:
    run = documents.run()
    assert run.heatmap is not None
    with pytest.raises(InvalidInput, match=named):
        render([replace(run, rows=(), heatmap=replace(run.heatmap, **broken))])  # type: ignore[arg-type]
