"""From settings to results: data, prompts, every question and method, what was measured before left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blend.config import EngineConfig, StoreConfig
from blend.engine import Engine
from blend.errors import InvalidInput
from blend.eval import datasets, methods, neighbours, results
from blend.eval.bars import bar
from blend.eval.datasets import Dataset
from blend.eval.heatmap import heatmap, subject
from blend.eval.journal import Header, Journal
from blend.eval.metrics import text_scores
from blend.eval.perf import warm_up
from blend.eval.plan import Planned, conditioned, plan
from blend.eval.prompts import Vary, as_it_is, prepare
from blend.eval.runner import CLOSENESS, NAMESPACE, measure
from blend.eval.settings import MeasuringSettings, Settings
from blend.eval.summary import summarize
from blend.eval.values import Heatmap, Identity, Kind, PromptKey, Record, Results
from blend.model import source
from blend.model.fingerprint import weights_digest
from blend.rag.embedding import Embedder
from blend.recompute import select
from blend.types import Chunk, Plan, Prompt
from blend.versions import Environment, environment

HOST_BYTES = 4 << 30
"""Budget of the chunks in memory: what the chunks of one prompt may take, and no more than is touched is taken."""

_WARM = 16  # tokens of a chunk


def load_dataset(settings: MeasuringSettings) -> Dataset:
    """Return the questions that settings name. Errors are those of :func:`blend.eval.datasets.load`."""
    return datasets.load(
        settings.dataset,
        passages=settings.passages,
        limit=settings.limit,
        seed=settings.seed,
        fields=settings.fields,
        split=settings.split,
    )


def open_engine(settings: Settings) -> Engine:
    """Return an engine for measuring: chunks in memory alone, nothing computed in the background.

    What is measured must not push a user's own chunks out of their store.
    """
    store = StoreConfig(host_bytes=HOST_BYTES, disk_bytes=0)
    return Engine(EngineConfig(settings.model, dtype=settings.dtype, recompute_misses=False, store=store))


def identity(engine: Engine, settings: MeasuringSettings, dataset: Dataset, prompts: str) -> Identity:
    """Return what results of this engine on these prompts (their digest) must share with others."""
    stats = engine.stats()
    return Identity(stats.model_fingerprint, settings.model, stats.dtype, dataset.digest, prompts)


@dataclass(frozen=True)
class _Found:
    """What was measured, and what with."""

    records: Sequence[Record]
    heatmap: Heatmap | None
    environment: Environment
    identity: Identity
    dropped: Mapping[str, int]


def collect(kind: Kind, settings: Settings, vary: Vary = as_it_is) -> Results:
    """Measure what settings ask for and return the results, which are written where the settings say.

    With a results directory, each record is kept as soon as it is there, and what a stopped run has kept is not
    measured again; a run that has everything loads no model.

    Args:
        vary: which prompts are made of each question.

    Raises:
        InvalidInput: wrong settings or data, or a directory that holds results of other settings.
        ModelError: the model cannot be used.
        OSError: the results cannot be written.
    """
    planned = plan(settings.methods, settings.ratios)
    dataset = load_dataset(settings)
    # Scores that need a package which is missing fail here, and not after a prefill.
    text_scores("", ["."], [name for name in settings.metrics if name not in CLOSENESS])
    weights = weights_digest(source.resolve(settings.model))  # tells without loading them whether they are the same
    measured = {**settings.measured(), "digest": dataset.digest, "weights": weights}
    if settings.results is None:
        return _document(kind, settings, measured, dataset, _measure(settings, measured, dataset, planned, vary, None))
    directory = Path(settings.results).expanduser()
    with Journal(directory, restart=settings.restart) as journal:
        if journal.header is None and not settings.restart and (directory / results.FILE).exists():
            allowed = "another directory, or --restart, which replaces them"
            raise InvalidInput(str(directory), f"other results ({results.FILE} without records)", allowed)
        journal.check(settings=measured)
        journal.check_records([(p.method, p.ratio) for p in planned])
        found = _finished(journal, planned) or _measure(settings, measured, dataset, planned, vary, journal)
        made = _document(kind, settings, measured, dataset, found)
        results.write(directory, made)
    return made


def _document(kind: Kind, settings: Settings, measured: Mapping[str, Any], dataset: Dataset, found: _Found) -> Results:
    return Results(
        kind=kind,
        command=settings.line(kind),
        settings={**measured, "margins": dict(settings.margins)},
        environment=found.environment,
        identity=found.identity,
        questions=len({record.question for record in found.records}),
        dropped={**dataset.dropped, **found.dropped},
        seed=settings.seed,
        rows=summarize(found.records, margins=settings.margins, seed=settings.seed),
        records=tuple(found.records),
        heatmap=found.heatmap,
    )


def _finished(journal: Journal, planned: Sequence[Planned]) -> _Found | None:
    """Return what a journal holds, if that is everything."""
    header = journal.header
    if header is None:
        return None
    complete = len(journal.records) == len(header.asked) * len(planned)
    if not complete or (journal.heatmap is None and subject(planned) is not None):
        return None
    order = _in_order(journal.records, header.asked, planned)
    return _Found(order, journal.heatmap, header.environment, header.identity, header.dropped)


def _measure(
    settings: Settings,
    measured: Mapping[str, Any],
    dataset: Dataset,
    planned: Sequence[Planned],
    vary: Vary,
    journal: Journal | None,
) -> _Found:
    """Measure what the journal has not, prompt by prompt."""
    with ExitStack() as stack:
        engine = stack.enter_context(open_engine(settings))
        prepared = prepare(engine, dataset.examples, max_new_tokens=settings.max_new_tokens, vary=vary)
        known = identity(engine, settings, dataset, prepared.digest)
        where = environment(engine.stats())
        asked = tuple(one.key for one in prepared.asked)
        if journal is not None:
            journal.check(identity=known, environment=where)
            if journal.header is None:
                journal.begin(Header(measured, known, where, asked, prepared.dropped))
        records = [] if journal is None else list(journal.records)
        drawn = None if journal is None else journal.heatmap
        shown = subject(planned)
        done = {record.key for record in records}
        tell = stack.enter_context(bar("answers", len(asked) * len(planned), len(done), show=not settings.json))
        related = _related(engine, dataset, settings.neighbours) if conditioned(planned) else None
        if len(records) < len(asked) * len(planned):
            _warm_up(engine, prepared.asked[0].prompt, planned)
        for one in prepared.asked:
            found = measure(
                engine,
                one.example,
                one.prompt,
                [p for p in planned if (*one.key, p.method, p.ratio) not in done],
                max_new_tokens=settings.max_new_tokens,
                metrics=settings.metrics,
                condition=one.condition,
                level=one.level,
                order=one.order,
                capped=settings.capped,
                related=related,
            )
            for record in found:
                records.append(record)
                if journal is not None:
                    journal.add(record)
                tell(len(records))
            if drawn is None and shown is not None:  # of the first prompt
                drawn = heatmap(engine, one.example.id, one.prompt, shown, namespace=NAMESPACE)
                if journal is not None:
                    journal.add_heatmap(drawn)
    return _Found(_in_order(records, asked, planned), drawn, where, known, prepared.dropped)


def _related(engine: Engine, dataset: Dataset, count: int) -> dict[Chunk, tuple[Chunk, ...]]:
    """Return the chunks that each passage is encoded behind: its ``count`` nearest ones of the whole data set."""
    passages = [passage for example in dataset.examples for passage in example.passages]
    return neighbours.behind(engine, neighbours.nearest(passages, Embedder(), count))


def _warm_up(engine: Engine, prompt: Prompt, planned: Sequence[Planned]) -> None:
    """Run each of the engine's methods once over the beginnings of a prompt's chunks."""
    short = [Chunk(s.token_ids[:_WARM]) if isinstance(s, Chunk) else s for s in prompt.segments]
    named = [(methods.split(p.method)[0], p.ratio) for p in planned]
    plans = {method: Plan(method, ratio) for method, ratio in named if method in select.methods()}
    warm_up(engine, Prompt(short), plans.values())


def _in_order(records: Sequence[Record], asked: Sequence[PromptKey], planned: Sequence[Planned]) -> list[Record]:
    """Return records by prompt and then by method, as they were asked for, in whatever order they came."""
    by_prompt = {key: i for i, key in enumerate(asked)}
    by_method = {(p.method, p.ratio): i for i, p in enumerate(planned)}
    return sorted(records, key=lambda r: (by_prompt[r.key[:4]], by_method[r.method, r.ratio]))
