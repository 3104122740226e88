"""Settings: flags and YAML say the same things, and what neither knows is refused with the nearest."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from blend.errors import InvalidConfig, InvalidInput, NotFound
from blend.eval import settings
from blend.eval.settings import CommandSettings, Settings


@dataclass(frozen=True)
class Pair(CommandSettings):
    """Settings of a command that takes a directory and some files by place."""

    directory: str = settings.setting("", "where", positional=True)
    files: tuple[str, ...] = settings.setting((), "which", positional=True)


def parsed(kind: type[CommandSettings], line: str) -> Any:
    parser = argparse.ArgumentParser()
    settings.add_flags(parser, kind)
    return settings.build(kind, vars(parser.parse_args(shlex.split(line))))


def test_flags_become_values_of_the_fields_types() -> None:
    line = "--limit 3 --ratios 0.1,.2 --methods 'reuse, head' --margins f1=0.1,top1=1e-2 --fields question=q --json"
    found = parsed(Settings, line)
    assert found == Settings(
        limit=3,
        ratios=(0.1, 0.2),
        methods=("reuse", "head"),
        margins={"f1": 0.1, "top1": 0.01},
        fields={"question": "q"},
        json=True,
    )
    assert parsed(Settings, "") == Settings()
    assert parsed(Pair, "here a b") == Pair(directory="here", files=("a", "b"))
    assert parsed(Pair, "") == Pair()


def test_yaml_says_what_flags_say_and_flags_beat_it(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "limit: 3\nmax-new-tokens: 4\nratios: [0, 0.2]\nmethods: reuse,head\n"
        "margins: {f1: 1}\njson: true\ndataset: '7'\n"
    )
    wanted = parsed(
        Settings, "--limit 3 --max-new-tokens 4 --ratios 0,0.2 --methods reuse,head --margins f1=1 --json --dataset 7"
    )
    assert parsed(Settings, f"--config {file}") == replace(wanted, config=str(file))
    beaten = parsed(Settings, f"--config {file} --limit 5 --no-json")
    assert (beaten.limit, beaten.json, beaten.max_new_tokens) == (5, False, 4)
    file.write_text("ratios: ['0.1', 2e-1]\nlimit: '3'\nmargins: {f1: 1e-3}\n")  # YAML takes 2e-1 for a text
    found = parsed(Settings, f"--config {file}")
    assert (found.ratios, found.limit, found.margins) == ((0.1, 0.2), 3, {"f1": 0.001})
    file.write_text("")
    assert parsed(Settings, f"--config {file}") == Settings(config=str(file))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ratio: 0.1", "ratios .the nearest"),
        ("limit: many", "limit"),
        ("limit: true", "limit"),
        ("methods: 3", "methods"),
        ("methods: [1]", "methods"),
        ("margins: {f1: yes}", "margins.f1"),
        ("- limit", "names of settings"),
        ("limit: [", "YAML"),
        ("max_new_tokens: 1\nmax-new-tokens: 2", "twice"),
        ("config: other.yaml", "config"),
        ("a: !!python/object/apply:os.getcwd []", "YAML"),
        ("ratios: [.nan]", "finite"),
        ("limit: 1\nlimit: 2", "limit stands there twice"),
        ("margins: {f1: 1, f1: 2}", "f1 stands there twice"),
        ("dataset: [a]", "a text"),
        ("dataset: {a: 1}", "a text"),
        ("fields: [a]", "names with values"),
        ("ratios: 0.5", "a list"),
        ("? [a]\n: 1", "YAML"),
    ],
)
def test_wrong_yaml_is_refused_with_its_place(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=named) as caught:
        parsed(Settings, f"--config {file}")
    assert str(file) in str(caught.value)


def test_a_missing_settings_file_is_named() -> None:
    with pytest.raises(NotFound, match=r"nowhere\.yaml"):
        parsed(Settings, "--config nowhere.yaml")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--limit 0", "limit"),
        ("--limit x", "--limit"),
        ("--seed -1", "seed"),
        ("--results ''", "a directory"),
        ("--ratios 0.1,2", "ratios"),
        ("--ratios 0.1,nan", "--ratios"),
        ("--ratios a", "--ratios"),
        ("--ratios 0.1,0.10", "once"),
        ("--methods ''", "at least one"),
        ("--methods query,head,query", "methods.*once"),
        ("--metrics f1,recal", "metrics"),
        ("--metrics tokenf1", "token_f1 .the nearest"),
        ("--margins f1", "NAME=VALUE"),
        ("--margins f1=-1", "margins: f1"),
        ("--margins f2=1", "f1 .the nearest"),
    ],
)
def test_wrong_values_are_named(line: str, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        parsed(Settings, line)


def test_a_dtype_that_the_engine_does_not_know_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="dtype"):
        Settings(dtype="float31")


def test_the_line_of_settings_gives_them_back() -> None:
    wanted = Settings(
        dataset="a file.json", ratios=(0.05, 0.15), margins={"f1": 0.1}, limit=3, json=True, results="out", seed=2
    )
    line = wanted.line("run")
    assert line == "blend-eval run --dataset 'a file.json' --limit 3 --seed 2 --ratios 0.05,0.15 --margins f1=0.1"
    again = parsed(Settings, line.removeprefix("blend-eval run"))
    assert again == replace(wanted, json=False, results=None)
    assert Pair(directory="a b", files=("c",)).line("x") == "blend-eval x 'a b' c"


def test_what_is_measured_leaves_out_margins_and_where_results_go() -> None:
    one = Settings(results="a", margins={"f1": 1.0}, json=True)
    assert one.measured() == Settings().measured()
    assert one.measured() != replace(one, seed=1).measured()
    assert {"results", "json", "config", "restart", "margins", "HOW"}.isdisjoint(one.measured())
