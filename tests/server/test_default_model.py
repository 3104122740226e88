"""The service as a newcomer meets it: the default model, real questions, honest reports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blend.types import Plan
from blend_server.client import Client, Document
from blend_server.server import BlendServer

pytestmark = pytest.mark.slow

FACTS = {
    "ferry.md": (
        "The ferry",
        "The ferry to Halm leaves the north pier at nine in the morning. A ticket costs four crowns.",
    ),
    "light.md": (
        "The lighthouse",
        "The lighthouse of Halm was built in 1888 of grey granite. Its lamp is seen for twenty miles.",
    ),
    "market.md": (
        "The market",
        "The market of Halm is held on Thursdays on the square behind the mill. It sells cheese and wool.",
    ),
    "mill.md": ("The mill", "The water mill of Halm grinds rye. It stands on the river Orn, below the stone bridge."),
    "year.md": (
        "The year in Halm",
        " ".join(
            f"In {month} the people of Halm {work}, and on the last evening of the month they {evening}."
            for month, work, evening in (
                ("January", "mend their nets by the fire", "sing in the hall of the rope makers"),
                ("February", "cut reeds on the frozen river", "race their sledges down the mill hill"),
                ("March", "paint the boats and tar the ropes", "light fires along the whole beach"),
                ("April", "sow barley and plant the first beans", "dance around the well on the square"),
                ("May", "shear the sheep on the western hills", "row out to the island with lanterns"),
                ("June", "cut the hay and bring it in by cart", "jump over the embers of the great fire"),
                ("July", "pick cherries behind the stone church", "listen to the band of the fishermen"),
                ("August", "harvest the barley before the storms", "share the first bread of the new flour"),
                ("September", "smoke herring in the long black sheds", "tell stories of ships that were lost"),
                ("October", "press apples in the yard of the inn", "walk the walls of the town with torches"),
            )
        ),
    ),
}
QUESTION = "In what year was the lighthouse of Halm built?"


@pytest.fixture(scope="module")
def client(default_server: BlendServer) -> Iterator[Client]:
    """A client of a server that has the facts."""
    with Client(default_server.address) as made:
        documents = (Document(name, text, title) for name, (title, text) in FACTS.items())
        ends = [p.WhichOneof("stage") for p in made.ingest(documents)]
        assert ends.count("stored") == len(FACTS)
        yield made


def test_the_right_passage_gives_the_right_answer(client: Client) -> None:
    answer = client.ask(QUESTION, k=1, max_new_tokens=16)
    assert "1888" in answer.text


def test_a_blended_answer_is_close_to_full_prefill_and_says_so(client: Client) -> None:
    answer = client.ask(QUESTION, k=4, plan=Plan("query", 0.15), max_new_tokens=16, compare_full=True)
    report = answer.report
    assert report.mode == "query"
    assert {chunk.outcome for chunk in report.chunks} == {"hit"}
    assert report.cached == sum(chunk.tokens for chunk in report.chunks)
    assert report.charged_ratio < 1
    assert report.comparison is not None
    assert report.comparison.first_token_kl < 1.0
    assert report.full_ms == report.comparison.full_ms > 0


def test_ratio_one_is_full_prefill_whatever_the_order(client: Client) -> None:
    for seed in (1, 2):
        blended = client.ask(QUESTION, k=4, plan=Plan("query", 1.0), passage_order_seed=seed, compare_full=True)
        full = client.ask(QUESTION, k=4, plan=Plan("full"), passage_order_seed=seed)
        assert blended.report.comparison is not None
        assert blended.report.comparison.first_token_kl < 1e-5
        assert blended.token_ids == full.token_ids


def test_the_default_plan_blends_as_the_calibration_says(client: Client) -> None:
    assert client.stats().engine.details["calibrated"] is True
    report = client.ask(QUESTION, k=8, max_new_tokens=1).report
    assert report.cached > 300
    assert report.mode == "query"
    assert report.reason.startswith("calibrated mean KL")
    assert 0 < report.charged_ratio <= 0.15
