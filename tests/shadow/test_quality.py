"""What comparisons come to, when they stop ``auto``, and how long that lasts."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from blend.config import EngineConfig, ServerConfig, ShadowConfig, VllmEngineConfig
from blend.errors import InvalidConfig, TierUnavailable
from blend.shadow.quality import KL_BOUNDS, Quality
from blend.shadow.record import Trip, TripRecord
from blend.types import Comparison

CONFIG = ShadowConfig(share=1.0, max_kl=0.3, window=5, least=3)


def quality(directory: Path | None = None, config: ShadowConfig = CONFIG) -> Quality:
    return Quality(config, TripRecord(directory, "abc"))


def take(watched: Quality, *kls: float, method: str = "auto", agrees: bool = True) -> None:
    for number, kl in enumerate(kls):
        watched.take(f"request-{number}", method, 100, Comparison(12.0, kl, agrees), watched.era)


def test_figures_of_the_last_ones_and_of_all() -> None:
    watched = quality(config=ShadowConfig(window=3, least=1))
    take(watched, 9.0, 0.2, 0.3, 0.1)
    take(watched, 0.005, method="query", agrees=False)
    found = watched.methods()["auto"]
    assert (found.compared, found.agreed, found.window, found.last_kl) == (4, 4, 3, 0.1)
    assert found.mean_kl == pytest.approx(0.2)
    assert found.upper_kl == pytest.approx(0.2 + 1.645 * 0.1 / math.sqrt(3))
    assert found.kl_sum == pytest.approx(9.6)
    assert dict(found.kl_buckets) == dict(zip(KL_BOUNDS, [0, 0, 0, 0, 1, 3, 3, 3, 4], strict=True))
    assert found.top1_agreement == 1.0
    other = watched.methods()["query"]
    assert (other.compared, other.agreed, other.upper_kl, other.top1_agreement) == (1, 0, None, 0.0)


def test_auto_is_stopped_by_the_mean_of_the_last_ones(caplog: pytest.LogCaptureFixture) -> None:
    watched = quality()
    take(watched, 5.0, 5.0)
    assert watched.stopped == "", "too few"
    watched = quality()
    take(watched, *[0.1] * 10, 0.9)
    assert watched.stopped == "", "one of five, a mean of 0.26"
    with caplog.at_level(logging.INFO):
        take(watched, 0.6, 0.1)
    assert "its last 5 compared requests, 0.360, exceeds 0.3" in watched.stopped
    assert watched.trip is not None
    (told,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "event=auto_stopped request_id=request-0" in told.getMessage()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert lines[1] == "event=compared request_id=request-1 method=auto tokens=100 kl=0.100000 top1=true full_ms=12.0"


def test_a_mean_at_the_threshold_stops_nothing() -> None:
    watched = quality(config=ShadowConfig(max_kl=0.25, window=4, least=1))
    take(watched, *[0.25] * 8)
    assert watched.trip is None


def test_a_named_method_does_not_stop_auto_but_a_fault_of_it_does() -> None:
    watched = quality()
    take(watched, *[5.0] * 20, method="reuse")
    assert watched.trip is None
    take(watched, math.nan, method="reuse")
    assert "the KL of a request of reuse was nan" in watched.stopped
    assert watched.broken == 1
    assert watched.methods()["reuse"].compared == 20


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_what_is_no_number_stops_auto_at_once(kl: float) -> None:
    watched = quality()
    take(watched, kl)
    assert watched.trip is not None


def test_without_a_threshold_nothing_stops_auto() -> None:
    watched = quality(config=ShadowConfig(share=1.0))
    take(watched, *[50.0] * 100, math.nan)
    assert watched.trip is None


def test_it_is_said_once_and_the_first_reason_stays(caplog: pytest.LogCaptureFixture) -> None:
    watched = quality()
    take(watched, *[0.5] * 20, math.nan)
    assert "0.500" in watched.stopped
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 1


def test_a_reset_forgets_the_window_and_keeps_the_sums() -> None:
    watched = quality()
    assert watched.reset() is None
    take(watched, *[0.5] * 3)
    trip = watched.reset()
    assert trip is not None
    assert "0.500" in trip.reason
    assert watched.stopped == ""
    found = watched.methods()["auto"]
    assert (found.compared, found.window, found.mean_kl, found.last_kl) == (3, 0, None, None)
    take(watched, 0.5, 0.5)
    assert watched.trip is None
    take(watched, 0.5)
    assert watched.trip is not None


def test_a_restart_keeps_it_stopped_whatever_the_settings_are_then(tmp_path: Path) -> None:
    watched = quality(tmp_path)
    take(watched, *[0.5] * 3)
    for config in (CONFIG, ShadowConfig()):
        again = quality(tmp_path, config)
        assert again.trip == watched.trip
    assert Quality(CONFIG, TripRecord(tmp_path, "another model")).trip is None
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert quality(tmp_path).reset() == watched.trip
    assert quality(tmp_path).trip is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff", b'{"since": "now"}'])
def test_a_record_that_cannot_be_read_stops_auto(tmp_path: Path, damage: bytes) -> None:
    record = TripRecord(tmp_path, "abc")
    record.write(Trip("now", "why"))
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    watched = quality(tmp_path)
    assert "cannot be read" in watched.stopped
    assert watched.reset() is not None
    assert quality(tmp_path).trip is None


def test_a_record_that_cannot_be_written_is_told_and_the_process_knows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = quality(tmp_path / "gone")
    take(watched, *[0.5] * 3)
    assert watched.trip is not None
    assert any("cannot be written" in record.getMessage() for record in caplog.records)
    with pytest.raises(TierUnavailable):
        watched.reset()
    assert watched.trip is not None, "fails closed"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"share": -0.1}, "share"),
        ({"share": 1.1}, "share"),
        ({"share": math.nan}, "share"),
        ({"max_kl": -1.0}, "max_kl"),
        ({"max_kl": math.nan}, "max_kl"),
        ({"window": 0}, "window"),
        ({"least": 0}, "least"),
        ({"least": 51}, "least"),
        ({"backlog": 0}, "backlog"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidConfig, match=f"shadow.{field}"):
        ShadowConfig(**settings)  # type: ignore[arg-type]


def test_vllm_compares_nothing_and_says_so() -> None:
    engine = EngineConfig(shadow=ShadowConfig(share=0.1))
    with pytest.raises(InvalidConfig, match="shadow.share.*vLLM"):
        ServerConfig(engine=engine, vllm=VllmEngineConfig())
    with pytest.raises(InvalidConfig, match="shadow.max_kl.*vLLM"):
        ServerConfig(engine=EngineConfig(shadow=ShadowConfig(max_kl=0.1)), vllm=VllmEngineConfig())
    assert ServerConfig(engine=engine).engine.shadow.share == 0.1
