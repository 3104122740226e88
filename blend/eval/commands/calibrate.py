"""``blend-eval calibrate``: the calibration file of a model, by which ``auto`` chooses."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from blend.engine import Engine
from blend.errors import InvalidInput
from blend.eval import calibrating, results
from blend.eval.bars import bar
from blend.eval.calibrating import Setting
from blend.eval.datasets import Dataset
from blend.eval.journal import Header, Journal
from blend.eval.measuring import identity, load_dataset
from blend.eval.neighbours import NEIGHBOURS, behind, nearest
from blend.eval.perf import tiered_engine, workload
from blend.eval.plan import plan
from blend.eval.prompts import Asked, Prepared, prepare
from blend.eval.settings import MeasuringSettings, setting
from blend.eval.stats import Estimate
from blend.eval.values import Level, Record
from blend.model import source
from blend.rag.embedding import Embedder
from blend.recompute import calibration
from blend.recompute.calibration import Calibration, StoredVariant
from blend.recompute.cost import Work
from blend.types import Chunk
from blend.versions import environment

HELP = "measure a model once, for method auto and its quality target to go by"

EXAMPLES = """\
blend-eval calibrate --model ./my-model
blend-eval calibrate --dataset questions.json --limit 40 --ratios 0.1,0.2 --output blend_calibration.json
blend-eval calibrate --variants plain,conditioned --neighbours 6 --seconds 3600 --results calibrating
"""


@dataclass(frozen=True)
class CalibrateSettings(MeasuringSettings):
    """What ``calibrate`` takes.

    Raises:
        InvalidInput: a value outside what is allowed.
    """

    methods: tuple[str, ...] = setting(
        ("query", "head"), f"with commas between, of {', '.join(calibration.selecting())}"
    )
    ratios: tuple[float, ...] = setting(
        (0.05, 0.1, 0.15, 0.3), "most that is charged, probes included, as shares of cached tokens"
    )
    variants: tuple[StoredVariant, ...] = setting(
        ("plain",),
        "how chunks are stored, with commas between: plain, conditioned (encoded behind their nearest passages);"
        " plain,conditioned for both",
    )
    neighbours: int = setting(NEIGHBOURS, "passages that each conditioned one is encoded behind, of the whole data set")
    seconds: float | None = setting(
        None, "after so many seconds no further question is begun; with --results they can go on (default: all are)"
    )
    output: str | None = setting(None, "file to write (default: blend_calibration.json beside the model's weights)")
    lengths: tuple[int, ...] = setting((256, 512, 1024, 2048), "tokens of the prompts that speed is measured with")
    repeats: int = setting(3, "how often each of them is measured; the best counts")

    HOW = MeasuringSettings.HOW | {"output", "seconds"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.lengths) < 1:
            raise InvalidInput("lengths", self.lengths, "numbers of 1 or more")
        for name in ("repeats", "neighbours"):
            if getattr(self, name) < 1:
                raise InvalidInput(name, getattr(self, name), "1 or more")
        if self.seconds is not None and self.seconds <= 0:
            raise InvalidInput("seconds", self.seconds, "a number above 0")


SETTINGS = CalibrateSettings


def run(settings: CalibrateSettings, console: Console) -> int:
    """Measure, write the file, print what is in it; returns the exit code."""
    planned = tuple(p for p in plan(settings.methods, settings.ratios) if p.method != "full")
    calibrating.check(settings.methods)
    output = _writable(settings)
    wanted = [
        Setting(p.method, p.ratio, variant) for variant in settings.variants for p in planned if p.ratio is not None
    ]
    made = _measure(settings, wanted)
    results.replace(output, results.dumps(made.as_dict()))
    if settings.json:
        sys.stdout.write(results.dumps(made.as_dict()))
    else:
        _show(console, made, output)
    return 0


def _writable(settings: CalibrateSettings) -> Path:
    """Return where the file goes, refused before anything is measured if it cannot."""
    if settings.output is None:
        output = source.resolve(settings.model) / calibration.FILE_NAME
    else:
        output = Path(settings.output).expanduser()
    if output.is_dir() or not os.access(output.parent, os.W_OK):
        raise InvalidInput("output", str(output), "a file in a directory that can be written to")
    return output


def _measure(settings: CalibrateSettings, wanted: list[Setting]) -> Calibration:
    dataset = load_dataset(settings)
    near = _near(settings, dataset)
    with ExitStack() as stack:
        journal = None
        if settings.results is not None:
            journal = stack.enter_context(Journal(Path(settings.results).expanduser(), restart=settings.restart))
        engine = stack.enter_context(tiered_engine(settings.model, settings.dtype))
        prepared = prepare(engine, dataset.examples, max_new_tokens=settings.max_new_tokens)
        if journal is not None:
            known = identity(engine, settings, dataset, prepared.digest)
            measured = {**settings.measured(), "digest": dataset.digest}
            where = environment(engine.stats())
            journal.check(settings=measured, identity=known, environment=where)
            if journal.header is None:
                asked = tuple(one.key for one in prepared.asked)
                journal.begin(Header(measured, known, where, asked, prepared.dropped))
        records = _losses(settings, engine, prepared, wanted, journal, behind(engine, near))
        load = workload(engine, dataset.examples)
        room = engine.decoder.max_positions - 1
        with bar("speed", show=not settings.json) as tell:
            times = calibrating.speeds(engine, load, load.fitting(settings.lengths, room), settings.repeats, tell)
    about = f"{Path(settings.dataset).name}, {settings.passages} passages, seed {settings.seed}"
    questions = len({record.question for record in records})
    return calibrating.assemble(settings.model, about, questions, calibrating.points(records), times)


def _near(settings: CalibrateSettings, dataset: Dataset) -> dict[str, tuple[str, ...]]:
    """Return each passage's neighbours, where they are wanted. The packaged model embeds every passage once."""
    if "conditioned" not in settings.variants:
        return {}
    passages = (passage for example in dataset.examples for passage in example.passages)
    found = nearest(passages, Embedder(), settings.neighbours)
    if len(found) < 2:
        raise InvalidInput("variants", "conditioned", "plain alone: the data set has one passage")
    return found


def _losses(
    settings: CalibrateSettings,
    engine: Engine,
    prepared: Prepared,
    wanted: list[Setting],
    journal: Journal | None,
    behind: Mapping[Chunk, Sequence[Chunk]],
) -> list[Record]:
    """Return every record, those of a stopped run included, question by question, as far as there is time."""
    found = {} if journal is None else {record.key: record for record in journal.records}
    asked = list[Asked]()
    until = math.inf if settings.seconds is None else perf_counter() + settings.seconds
    with bar("answers", len(prepared.asked) * len(wanted), len(found), show=not settings.json) as tell:
        for one in prepared.asked:
            missing = [setting for setting in wanted if _key(one, setting) not in found]
            if missing and asked and perf_counter() > until:
                continue
            asked.append(one)
            for record in calibrating.measure(
                engine, one.example, one.prompt, missing, max_new_tokens=settings.max_new_tokens, behind=behind
            ):
                if journal is not None:
                    journal.add(record)
                found[record.key] = record
                tell(len(found))
    return [found[_key(one, setting)] for one in asked for setting in wanted]


def _key(one: Asked, setting: Setting) -> tuple[str, str, Level, int, str, float | None]:
    """The key of a prompt's record in a setting."""
    return (one.example.id, setting.condition, one.level, one.order, setting.method, setting.ratio)


def _show(console: Console, made: Calibration, output: Path) -> None:
    table = Table(
        title=f"{made.model}: {made.questions} questions of {made.data}",
        caption="against full prefill: mean [95% interval], KL in nats; answer KL along full prefill's greedy answer",
    )
    for column in ("method", "chunks", "ratio", "charged", "first-token KL", "answer KL", "top-1"):
        table.add_column(column, justify="left" if column in ("method", "chunks") else "right")
    for p in made.points:
        values = [
            str(Estimate(mean or 0.0, low or 0.0, high or 0.0, made.questions))
            for mean, low, high in (
                (p.kl, p.kl_low, p.kl_high),
                (p.answer_kl, p.answer_kl_low, p.answer_kl_high),
                (p.top1, p.top1_low, p.top1_high),
            )
        ]
        default = " (default)" if p == made.default else ""
        table.add_row(p.method + default, p.variant, f"{p.ratio:g}", f"{p.charged:.3f}", *values)
    console.print(table)
    if made.passes is not None:
        ms = made.passes.of(Work.full(made.passes.most))
        console.print(f"full prefill: {ms:.0f} ms at {made.passes.most} tokens on {made.machine}")
    for tier, curve in made.loads.items():
        rate = curve.most / 1e6 / curve.ms(curve.most)
        console.print(f"chunks from {tier}: {rate:.2f} GB/s at {curve.most / 1e6:.0f} MB")
    console.print(f"written to {output}", soft_wrap=True)
