"""Settings of the commands: frozen dataclasses whose fields are flags and YAML keys alike.

A field of a settings class is one flag (``max_new_tokens`` is ``--max-new-tokens``) and one key of the YAML file that
``--config`` names. Flags beat the file, the file beats the defaults.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from blend.config import EngineConfig
from blend.decoding import decode, encode, hints, read_yaml
from blend.errors import InvalidInput, NotFound
from blend.eval import methods
from blend.eval.metrics import METRICS
from blend.eval.neighbours import NEIGHBOURS
from blend.names import unknown

AnySettings = TypeVar("AnySettings", bound="CommandSettings")


def setting(default: Any, text: str, *, positional: bool = False) -> Any:
    """Return a dataclass field that is a flag.

    Args:
        default: a dictionary is copied for each object.
        text: what ``--help`` says; the default is added to it.
        positional: whether it is given without a flag's name.
    """
    about = {"help": text, "positional": positional}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class CommandSettings:
    """What every command takes."""

    json: bool = setting(False, "print one JSON document and nothing else")
    config: str | None = setting(None, "YAML file whose keys are the names of these flags; flags beat it")

    HOW: ClassVar[frozenset[str]] = frozenset({"json", "config"})
    """Fields that say how results are shown and kept, not what is measured."""

    def line(self, command: str) -> str:
        """Return the command line, quoted for a shell, that measures the same: all that differs from the defaults."""
        words = ["blend-eval", command]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in self.HOW or value == _default(f):
                continue
            if f.metadata["positional"]:
                words += [*value] if isinstance(value, tuple) else [value]
            elif isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{_flag(f.name)}")
            else:
                words += [f"--{_flag(f.name)}", _shown(value)]
        return shlex.join(words)


@dataclass(frozen=True)
class MeasuringSettings(CommandSettings):
    """What every command that measures takes. Each list has something in it, and nothing twice.

    Raises:
        InvalidInput: a value outside what is allowed.
    """

    dataset: str = setting("demo", "demo, needle-single?tokens=4000&count=20 and its kin, a JSON(L) file, or a hub id")
    fields: Mapping[str, str] = setting({}, "names of another format's fields: question=q,answers=a,passages=docs")
    split: str | None = setting(None, "split of a hub data set")
    limit: int | None = setting(None, "questions to take, spread evenly over the data (default: all)")
    passages: int = setting(8, "passages a question, its gold ones among them, where the file leaves the choice")
    seed: int = setting(0, "of all choices and draws")
    model: str = setting("smollm2-135m", "name, directory or hub id")
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16")
    methods: tuple[str, ...] = setting(
        ("reuse", "random", "head", "deviation", "query"), f"with commas between, of {', '.join(methods.names())}"
    )
    ratios: tuple[float, ...] = setting((0.15,), "shares of cached tokens, 0 to 1, with commas between")
    max_new_tokens: int = setting(16, "most tokens of an answer, and of full prefill's that methods are held against")
    results: str | None = setting(None, "directory for results; a run that was stopped goes on from there")
    restart: bool = setting(False, "measure anew what the results directory has already")

    HOW: ClassVar[frozenset[str]] = CommandSettings.HOW | {"results", "restart"}

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("passages", 1), ("max_new_tokens", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidInput(name, value, f"{least} or more")
        if self.results == "":
            raise InvalidInput("results", self.results, "a directory")
        EngineConfig(self.model, dtype=self.dtype)  # refuses what is not known
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), tuple):
                _some_and_once(f.name, value)
        for ratio in self.ratios:
            if not 0 <= ratio <= 1:
                raise InvalidInput("ratios", ratio, "numbers from 0 to 1")

    def measured(self) -> dict[str, Any]:
        """Return, as JSON has it, what the measurement depends on: not where results go."""
        names = {f.name for f in fields(self)} - self.HOW
        return {name: encode(getattr(self, name)) for name in sorted(names)}


@dataclass(frozen=True)
class Settings(MeasuringSettings):
    """What every command takes that measures answers.

    Raises:
        InvalidInput: a value outside what is allowed.
    """

    capped: bool = setting(False, "take ratios as caps on the charged share, a method's own probes included")
    neighbours: int = setting(NEIGHBOURS, "nearest passages that chunks of METHOD@conditioned are encoded behind")
    metrics: tuple[str, ...] = setting(tuple(METRICS), "what is measured of each answer")
    margins: Mapping[str, float] = setting(
        {"f1": 0.02, "first_kl": 0.05}, "how much worse than full prefill a method may be and pass as no worse"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.neighbours < 1:
            raise InvalidInput("neighbours", self.neighbours, "1 or more")
        for name in (*self.metrics, *self.margins):
            if name not in METRICS:
                raise unknown("metrics" if name in self.metrics else "margins", name, METRICS)
        for name, margin in self.margins.items():
            if margin < 0:
                raise InvalidInput(f"margins: {name}", margin, "0 or more, in the metric's unit")

    def measured(self) -> dict[str, Any]:
        """Return what the measurement depends on: not the margins either, which judge it."""
        found = super().measured()
        del found["margins"]
        return found


def _some_and_once(name: str, values: Sequence[object]) -> None:
    if not values:
        raise InvalidInput(name, "none", "at least one")
    if len(set(values)) != len(values):
        raise InvalidInput(name, ", ".join(str(v) for v in values), "each once")


# ------------------------------------------------------------ flags and files


def add_flags(parser: argparse.ArgumentParser, kind: type[CommandSettings]) -> None:
    """Add one flag a field of ``kind``. What is not given on the command line leaves no trace in what is parsed."""
    for f in fields(kind):
        default = _default(f)
        told = (
            ""
            if default is None or default is False or default in ("", ()) or "(default" in f.metadata["help"]
            else _shown(default)
        )
        text = f.metadata["help"] + (f" (default: {told})" if told else "")
        text = text.replace("%", "%%")
        many = get_origin(hints(kind)[f.name]) is tuple
        if f.metadata["positional"]:
            parser.add_argument(f.name, nargs="*" if many else "?", default=argparse.SUPPRESS, help=text)
        elif hints(kind)[f.name] is bool:
            parser.add_argument(
                f"--{_flag(f.name)}", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            metavar = f.name.upper()
            parser.add_argument(f"--{_flag(f.name)}", default=argparse.SUPPRESS, metavar=metavar, help=text)


def flags(kind: type[CommandSettings]) -> list[str]:
    """Return the flags that :func:`add_flags` adds."""
    return [f"--{_flag(f.name)}" for f in fields(kind) if not f.metadata["positional"]]


def build(kind: type[AnySettings], words: Mapping[str, object]) -> AnySettings:
    """Return the settings that flags and, where they name one, a YAML file make.

    Args:
        words: what was given on the command line, by field, as text; lists as ``a,b``, mappings as ``a=1,b=2``.

    Raises:
        NotFound: no such file.
        InvalidInput: not YAML, an unknown key (with the nearest), or a wrong value.
    """
    given: dict[str, Any] = {}
    where = words.get("config")
    if where is not None:
        given.update(from_yaml(kind, str(where)))
    for name, value in words.items():
        given[name] = _value(kind, name, value, "--" + _flag(name))
    return kind(**given)


def from_yaml(kind: type[CommandSettings], path: str) -> dict[str, object]:
    """Return the values by field that a YAML file gives for ``kind``. Errors are those of :func:`build`."""
    if not Path(path).is_file():
        raise NotFound("settings file", path)
    try:
        text = Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(path, str(error), "YAML in UTF-8") from error
    raw = read_yaml(text, path)
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise InvalidInput(path, raw, "names of settings with their values")
    given: dict[str, object] = {}
    known = [f.name for f in fields(kind) if f.name != "config"]
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise unknown(f"{path}: a setting", key, known)
        if name in given:
            raise InvalidInput(f"{path}: {name}", "twice", "each setting once")
        given[name] = _value(kind, name, value, f"{path}: {name}")
    return given


def _value(kind: type[CommandSettings], name: str, value: object, where: str) -> Any:
    """Return a value as the field's annotation wants it, whether it is written as YAML has it or as a flag has it."""
    wanted: Any = hints(kind)[name]
    origin = get_origin(wanted)
    if isinstance(value, str) and origin is tuple:
        value = [part.strip() for part in value.split(",") if part.strip()]
    elif isinstance(value, str) and _is_mapping(origin):
        value = _pairs(value, where)
    return decode(wanted, _numbers(wanted, value, where), where)


def _is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _pairs(text: str, where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = (p.strip() for p in part.partition("="))
        if not (name and equals and value) or name in found:
            raise InvalidInput(where, text, "NAME=VALUE pairs with commas between, each name once")
        found[name] = value
    return found


def _numbers(wanted: Any, value: object, where: str) -> object:
    """Turn text into the numbers that ``wanted`` asks for, in lists and mappings too."""
    if isinstance(value, list) and get_origin(wanted) is tuple:
        return [_numbers(get_args(wanted)[0], inner, where) for inner in value]
    if isinstance(value, dict) and _is_mapping(get_origin(wanted)):
        return {name: _numbers(get_args(wanted)[1], inner, f"{where} {name}") for name, inner in value.items()}
    if isinstance(value, str):
        for number, what in ((int, "an integer"), (float, "a finite number")):
            if wanted is number or number in get_args(wanted):
                try:
                    return number(value)
                except ValueError:
                    raise InvalidInput(where, value, what) from None
    return value


def _default(f: Field[Any]) -> Any:
    return f.default_factory() if callable(f.default_factory) else f.default


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _shown(value: object) -> str:
    """Return a value as a flag takes it."""
    if isinstance(value, Mapping):
        return ",".join(f"{name}={_shown(inner)}" for name, inner in value.items())
    if isinstance(value, tuple):
        return ",".join(_shown(inner) for inner in value)
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
