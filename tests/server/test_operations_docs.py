"""docs/operations.md and examples/alerts.yaml name the metrics that there are, and all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import Metric

from blend_server.operations.figures import Sources
from blend_server.operations.observing import Observer
from blend_server.operations.reasons import REASONS

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "operations.md").read_text("utf-8")
GROUPS = yaml.safe_load((ROOT / "examples" / "alerts.yaml").read_text("utf-8"))["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
PARTS = re.compile(r"_(bucket|count|sum)$")
METRIC = re.compile(r"\b(?:blend|process)_[a-z0-9_]+\b")


def exposed() -> dict[str, str]:
    """Every metric of a server by the name that it is asked for by, and its kind."""

    def nothing(*_: object) -> Any:
        raise AssertionError("describing asks nobody")

    observer = Observer()
    observer.watch(Sources(nothing, nothing, nothing, 1, nothing, nothing, nothing))
    found: dict[str, str] = {}
    for collector in observer.registry._collector_to_names:
        families: list[Metric] = list(getattr(collector, "describe", collector.collect)())
        found.update({f"{f.name}_total" if f.type == "counter" else f.name: f.type for f in families})
    return found


def named(text: str) -> set[str]:
    return {name for name in METRIC.findall(text) if name != "blend_server"}


def test_the_registry_and_the_page_name_the_same_metrics() -> None:
    documented = {PARTS.sub("", name) for name in named(DOC)}
    assert documented == set(exposed())


def test_each_metric_has_a_row_that_says_what_it_means() -> None:
    rows = re.findall(r"^\| `((?:blend|process)_\w+)` \|.*\| (.+) \|$", DOC, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(exposed())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_asks_for_metrics_that_there_are(rule: dict[str, Any]) -> None:
    there = exposed()
    asked = named(rule["expr"])
    assert asked
    for name in asked:
        plain = PARTS.sub("", name)
        assert plain in there, name
        assert (plain == name) == (there[plain] != "histogram"), f"{name} is a {there[plain]}"
    assert rule["expr"].count("(") == rule["expr"].count(")") and rule["annotations"]["summary"]
    assert rule["labels"]["severity"] in ("page", "ticket")


def test_a_server_that_is_gone_or_starts_over_and_over_is_told_of() -> None:
    """What a server says of itself ends with it."""
    rules = {rule["alert"]: rule for rule in RULES}
    for part in ('up{job="blend"} == 0', 'absent(up{job="blend"})', "blend_serving == 0"):
        assert part in rules["BlendNotServing"]["expr"].split(" or ")
    assert "changes(process_start_time_seconds" in rules["BlendRestarts"]["expr"]
    (scraped,) = re.findall(r"^  - job_name: (\w+)$", DOC, re.MULTILINE)
    assert set(re.findall(r'job="(\w+)"', str(RULES))) == {scraped}


def test_the_page_shows_the_rules_of_the_known_troubles_as_they_are() -> None:
    shown = dict(re.findall(r"^`(\w+)`:\n\n```promql\n(.*?)\n```$", DOC, re.MULTILINE | re.DOTALL))
    rules = {rule["alert"]: " ".join(rule["expr"].split()) for rule in RULES}
    assert {name: " ".join(text.split()) for name, text in shown.items()} == {name: rules[name] for name in shown}
    assert [name for name in rules if f"`{name}`" not in DOC] == []
    troubles = DOC.split("## Known troubles")[1].split("\n## ")[0].split("\n### ")[1:]
    assert len(troubles) == 6
    for text in troubles:
        assert "*Looks like:*" in text and "*Shown by*" in text and "```promql" in text and "*Do:*" in text


def test_the_page_names_every_reason() -> None:
    assert [reason for reason in REASONS if f"`{reason}`" not in DOC] == []
