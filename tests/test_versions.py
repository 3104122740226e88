"""The version matrix: of a process, of an engine, over the wire, and what ``blend-client`` prints of it."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import pytest
from rich.console import Console

import blend
from blend import versions
from blend.store import LAYOUT_VERSION
from blend.versions import Budget, Environment
from blend_server import facts
from blend_server.client import show
from blend_server.proto.blend.v1 import blend_pb2 as pb
from tests import tiny

MiB = 1 << 20


def test_a_process_without_an_engine_tells_its_software_and_machine() -> None:
    found = versions.environment()
    assert (found.blend, found.torch) == (blend.__version__, metadata.version("torch"))
    assert found.threads >= 1 and found.cpu and found.engine == found.model == found.fingerprint == ""
    assert found.protocol == pb.DESCRIPTOR.package
    assert json.loads(json.dumps(versions.as_json())) == json.loads(json.dumps(asdict(found)))


def test_an_engine_adds_model_shape_and_tiers(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model", "yarn")
    with tiny.engine(model, tmp_path / "store") as engine:
        found = versions.environment(engine.stats())
        assert found.fingerprint == engine.model_fingerprint and found.tokenizer == engine.tokenizer.digest
    assert (found.engine, found.dtype, found.device) == ("native", "float32", "cpu")
    assert (found.layout_version, found.tensor_parallel) == (LAYOUT_VERSION, 1)
    assert json.loads(found.rope)["rope_type"] == "yarn"
    assert found.tiers == (Budget("host", 64 * MiB), Budget("disk", 256 * MiB))


def test_what_is_not_installed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        if name in ("torch", "transformers"):
            return "1"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.metadata, "version", missing)
    versions._process.cache_clear()
    found = versions.environment()
    versions._process.cache_clear()
    assert found.vllm is None and found.mooncake is None


ENVIRONMENT = Environment(
    "0.1.0", "3.11.9", "2.13.0", "5.19.0", "Linux", "a processor", 2, "cpu", "0.32.0", None, "native", "smollm2-135m",
    "ab12", "cd34", "float32", 1, '{"rope_theta":10000.0}', 1, (Budget("host", MiB),),
)  # fmt: skip


@pytest.mark.parametrize("budgets", [True, False])
def test_the_message_says_the_same_and_budgets_only_to_whom_they_belong(budgets: bool) -> None:
    message = facts.environment_to_proto(ENVIRONMENT, budgets=budgets)
    tiers = tuple(Budget(tier.tier, tier.capacity_bytes) for tier in message.tiers)
    mooncake = message.mooncake if message.HasField("mooncake") else None
    names = [name for name in asdict(ENVIRONMENT) if name not in ("tiers", "mooncake")]
    back = Environment(**{name: getattr(message, name) for name in names}, mooncake=mooncake, tiers=tiers)
    assert back == (ENVIRONMENT if budgets else replace(ENVIRONMENT, tiers=()))
    assert {field.name for field in message.DESCRIPTOR.fields} == set(asdict(ENVIRONMENT))


def test_the_command_prints_it() -> None:
    found = pb.Stats(version="0.1.0", environment=facts.environment_to_proto(ENVIRONMENT, budgets=True))
    out = io.StringIO()
    show.stats(Console(file=out, width=200), found)
    printed = out.getvalue()
    for text in ("torch 2.13.0", "vLLM 0.32.0", "a processor, 2 threads", "ab12", "cd34", "layout 1", "blend.v1"):
        assert text in printed
    assert "Mooncake" not in printed
    show.stats(Console(file=(older := io.StringIO())), pb.Stats(version="0.0.9"))
    assert "software" not in older.getvalue()
