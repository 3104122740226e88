"""``blend-eval calibrate``: the calibration file of a model, by which ``auto`` chooses."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from blend.engine import Engine
from blend.errors import InvalidInput
from blend.eval import calibrating, results
from blend.eval.bars import bar
from blend.eval.journal import Header, Journal
from blend.eval.measuring import identity, load_dataset
from blend.eval.perf import tiered_engine, workload
from blend.eval.plan import plan
from blend.eval.prompts import Prepared, prepare
from blend.eval.settings import MeasuringSettings, setting
from blend.eval.stats import Estimate
from blend.eval.values import Record
from blend.model import source
from blend.recompute import calibration
from blend.recompute.calibration import Calibration
from blend.versions import environment

HELP = "measure a model once, for method auto and its quality target to go by"

EXAMPLES = """\
blend-eval calibrate --model ./my-model
blend-eval calibrate --dataset questions.json --limit 40 --ratios 0.1,0.2 --output blend_calibration.json
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
    output: str | None = setting(None, "file to write (default: blend_calibration.json beside the model's weights)")
    lengths: tuple[int, ...] = setting((256, 512, 1024, 2048), "tokens of the prompts that speed is measured with")
    repeats: int = setting(3, "how often each of them is measured; the best counts")

    HOW = MeasuringSettings.HOW | {"output"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.lengths) < 1:
            raise InvalidInput("lengths", self.lengths, "numbers of 1 or more")
        if self.repeats < 1:
            raise InvalidInput("repeats", self.repeats, "1 or more")


SETTINGS = CalibrateSettings


def run(settings: CalibrateSettings, console: Console) -> int:
    """Measure, write the file, print what is in it; returns the exit code."""
    planned = tuple(p for p in plan(settings.methods, settings.ratios) if p.method != "full")
    calibrating.check(settings.methods)
    output = _writable(settings)
    made = _measure(settings, [(p.method, p.ratio) for p in planned if p.ratio is not None])
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


def _measure(settings: CalibrateSettings, points: list[tuple[str, float]]) -> Calibration:
    dataset = load_dataset(settings)
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
        records = _losses(settings, engine, prepared, points, journal)
        load = workload(engine, dataset.examples)
        room = engine.decoder.max_positions - 1
        with bar("speed", show=not settings.json) as tell:
            times = calibrating.speeds(engine, load, load.fitting(settings.lengths, room), settings.repeats, tell)
    about = f"{Path(settings.dataset).name}, {settings.passages} passages, seed {settings.seed}"
    questions = len({record.question for record in records})
    return calibrating.assemble(settings.model, about, questions, calibrating.points(records), times)


def _losses(
    settings: CalibrateSettings,
    engine: Engine,
    prepared: Prepared,
    points: list[tuple[str, float]],
    journal: Journal | None,
) -> list[Record]:
    """Return every record, those of a stopped run included, question by question."""
    found = {} if journal is None else {record.key: record for record in journal.records}
    total = len(prepared.asked) * len(points)
    with bar("answers", total, len(found), show=not settings.json) as tell:
        for one in prepared.asked:
            missing = [point for point in points if (*one.key, *point) not in found]
            for record in calibrating.measure(
                engine, one.example, one.prompt, missing, max_new_tokens=settings.max_new_tokens
            ):
                if journal is not None:
                    journal.add(record)
                found[record.key] = record
                tell(len(found))
    return [found[(*one.key, *point)] for one in prepared.asked for point in points]


def _show(console: Console, made: Calibration, output: Path) -> None:
    table = Table(
        title=f"{made.model}: {made.questions} questions of {made.data}",
        caption="against full prefill: mean [95% interval], KL in nats; answer KL along full prefill's greedy answer",
    )
    for column in ("method", "ratio", "charged", "first-token KL", "answer KL", "top-1"):
        table.add_column(column, justify="left" if column == "method" else "right")
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
        table.add_row(p.method + default, f"{p.ratio:g}", f"{p.charged:.3f}", *values)
    console.print(table)
    if made.prefill is not None:
        ms = made.prefill.ms(made.prefill.most)
        console.print(f"full prefill: {ms:.0f} ms at {made.prefill.most} tokens on {made.machine}")
    for tier, curve in made.loads.items():
        rate = curve.most / 1e6 / curve.ms(curve.most)
        console.print(f"chunks from {tier}: {rate:.2f} GB/s at {curve.most / 1e6:.0f} MB")
    console.print(f"written to {output}", soft_wrap=True)
