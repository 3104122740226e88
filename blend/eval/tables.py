"""Results as tables in a terminal, and what their differences are worth in words."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from blend.eval.metrics import METRICS
from blend.eval.plan import Planned
from blend.eval.stats import FEWEST, Estimate
from blend.eval.summary import RECOVERY
from blend.eval.values import Results, Row

_QUALITY = ("f1", "em", "token_f1", "rouge_l", "contains")
_CLOSE = ("first_kl", "answer_kl", "top1", "same_answer", "attention_error")


def show(console: Console, results: Results) -> None:
    """Print the results: answers, closeness to full prefill, what differs, and what was left out."""
    about = (
        f"{results.identity.name} ({results.identity.dtype}) on {results.settings['dataset']}: "
        f"{results.questions} questions, seed {results.seed}"
    )
    measured = {name for row in results.rows for name in row.metrics}
    console.print(_table(f"Answers: {about}", results.rows, [n for n in _QUALITY if n in measured], costs=True))
    close = [n for n in _CLOSE if n in measured]
    others = [row for row in results.rows if row.method != "full"]
    if close and others:
        recovered = [f"{RECOVERY}{n}" for n in ("answer_kl", "first_kl") if f"{RECOVERY}{n}" in measured][:1]
        console.print(_table(f"Against full prefill: {about}", others, [*close, *recovered], costs=False))
    for line in (*_differences(results.rows), *_margins(results), *_left_out(results)):
        console.print(line, soft_wrap=True)


def _table(title: str, rows: Iterable[Row], names: list[str], *, costs: bool) -> Table:
    caption = "means with 95% intervals" + ("; TTFT in ms" if costs else "; KL in nats, along full's greedy answer")
    table = Table(title=title, caption=caption)
    table.add_column("method")
    for name in ("ratio", "charged", *(_title(n) for n in names), *(("TTFT p50", "p95") if costs else ())):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [row.method, "" if row.ratio is None else f"{row.ratio:g}", f"{row.charged:.3f}"]
        cells += [_cell(row.metrics[n]) if n in row.metrics else "" for n in names]
        if costs:
            cells += [f"{row.ttft_ms['p50']:.0f}", f"{row.ttft_ms['p95']:.0f}"]
        table.add_row(*cells)
    return table


def _title(name: str) -> str:
    if name.startswith(RECOVERY):
        return f"recovered, {_title(name.removeprefix(RECOVERY))}"
    title = METRICS[name].title
    first = title.split()[0]
    return title if first[1:] != first[1:].lower() else title[0].lower() + title[1:]


def _cell(estimate: Estimate) -> str:
    """Return a mean with its interval on a line of its own, so that tables stay narrow."""
    return f"{estimate.mean:.3f}\n{estimate.interval}".rstrip()


def signed(estimate: Estimate) -> str:
    """Return a difference with its sign and interval."""
    interval = f" [{estimate.low:+.3f}, {estimate.high:+.3f}]" if estimate.count > 1 else ""
    return f"{estimate.mean:+.3f}{interval}"


def chance(p: float) -> str:
    """Return a p-value as it is read."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def worth(noise: bool, questions: int) -> str:
    """Return in words what a difference is worth."""
    if questions < FEWEST:
        return f"inside the noise: {questions} {'question is' if questions == 1 else 'questions are'} too few to tell"
    return "inside the noise" if noise else "outside the noise"


def _differences(rows: Iterable[Row]) -> Iterable[str]:
    """What each method's F1 and KL differ by from their baselines."""
    for row in rows:
        for name in ("f1", "answer_kl" if "answer_kl" in row.against else "first_kl"):
            if name in row.against:
                found = row.against[name]
                yield (
                    f"{Planned(row.method, row.ratio)}: {_title(name)} {signed(found.difference)} against "
                    f"{found.baseline}, {chance(found.p_holm)} (Holm): {worth(found.noise, found.difference.count)}"
                )


def _margins(results: Results) -> Iterable[str]:
    margins = results.settings.get("margins")
    if not isinstance(margins, dict):
        return
    for name, margin in margins.items():
        judged = [row for row in results.rows if name in row.non_inferior]
        if judged:
            shown = [str(Planned(r.method, r.ratio)) for r in judged if r.non_inferior[name]]
            listed = ", ".join(shown) or "none"
            yield f"shown to be no worse than full prefill by more than {margin:g} in {_title(name)}: {listed}"


def _left_out(results: Results) -> Iterable[str]:
    for reason, count in results.dropped.items():
        yield f"dropped, {reason}: {count}"
    warned: dict[str, int] = {}
    for record in results.records:
        for warning in record.warnings:
            warned[warning] = warned.get(warning, 0) + 1
    for warning, count in warned.items():
        yield f"warning ({count} of {len(results.records)} answers): {warning}"
