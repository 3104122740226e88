"""Namespaces of an engine: other tenants' and other models' KV is never read, and a namespace can be dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blend import Engine, Plan, Prompt, StoreConfig
from blend.errors import InvalidInput, ResourceExhausted
from blend.store import ObjectKey, Usage, tenant_tag
from tests import tiny

ModelOf = Callable[[str], Path]
SECRET = b"a secret of this test suite"
REUSE = Plan("reuse")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """Returns the directory of a saved tiny model of an architecture, made once."""
    made: dict[str, Path] = {}

    def get(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tiny.save_model(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return get


def config(directory: Path, **changes: Any) -> StoreConfig:
    settings: dict[str, Any] = dict(host_bytes=16 << 20, disk_bytes=64 << 20, directory=directory, fsync=False)
    return StoreConfig(**{**settings, "secret": SECRET, **changes})


def outcomes(engine: Engine, prompt: Prompt, namespace: str = "default") -> set[str]:
    return {chunk.outcome for chunk in engine.prefill(prompt, REUSE, namespace=namespace).report.chunks}


def test_other_models_and_tenants_never_read_what_is_stored(model_of: ModelOf, tmp_path: Path) -> None:
    """The same tokens in one store, asked for by every other model, dtype, sink and tenant."""
    prompt = tiny.prompt()
    chunks = tiny.chunks_of(prompt)
    retrained = tiny.save_model(tmp_path / "retrained", "llama", seed=1)
    with tiny.engine(model_of("llama"), tmp_path, store=config(tmp_path / "store")) as engine:
        engine.precompute(chunks, namespace="alice")
        want = engine.prefill(prompt, REUSE, namespace="alice")
        keys = {engine.content_key(chunk, namespace="alice") for chunk in chunks}
        assert outcomes(engine, prompt, "alice") == {"hit"}
        assert outcomes(engine, prompt, "bob") == {"miss"}
        stored = [ObjectKey(key, "plain") for key in keys]
        tag = engine.store.known.learn("alice")
        assert {key.tenant for key in stored} == {tag} == {tenant_tag(SECRET, "alice")}
    others: list[tuple[Path, dict[str, Any]]] = [
        (retrained, {}),
        (model_of("llama"), {"dtype": "bfloat16"}),
        (model_of("llama"), {"sink": ()}),
        (model_of("yarn"), {}),
    ]
    models = set()
    for model, changes in others:
        with tiny.engine(model, tmp_path, store=config(tmp_path / "store"), **changes) as engine:
            assert outcomes(engine, prompt, "alice") == {"miss"}
            assert keys.isdisjoint(engine.content_key(chunk, namespace="alice") for chunk in chunks)
            got = engine.prefill(prompt, REUSE, namespace="alice")
            full = engine.prefill(prompt, Plan("full"), namespace="alice")
            assert (got.logits - full.logits).abs().max() <= 1e-3 * max(1.0, float(full.logits.abs().max()))
            # What the other model left is seen, as another's, and not touched.
            (left,) = [space for space in engine.namespaces() if not space.current]
            assert (left.name, left.tiers["disk"].objects) == ("alice", len(chunks))
            models.add(ObjectKey(engine.content_key(chunks[0]), "plain").namespace)
    assert len(models) == len(others)
    with tiny.engine(model_of("llama"), tmp_path, store=config(tmp_path / "store")) as engine:
        again = engine.prefill(prompt, REUSE, namespace="alice")
        assert {chunk.outcome for chunk in again.report.chunks} == {"hit"}
        assert torch.equal(again.logits, want.logits)


def test_a_namespace_is_listed_and_dropped_by_name(model_of: ModelOf, tmp_path: Path) -> None:
    prompt = tiny.prompt()
    chunks = tiny.chunks_of(prompt)
    newer = tiny.save_model(tmp_path / "newer", "llama", seed=1)
    with tiny.engine(newer, tmp_path, store=config(tmp_path / "store")) as engine:
        engine.precompute(chunks[:1], namespace="alice")
        engine.precompute(chunks[:1], namespace="carol")
    with tiny.engine(model_of("llama"), tmp_path, store=config(tmp_path / "store")) as engine:
        engine.precompute(chunks, namespace="alice")
        engine.precompute([chunks[1]], behind=[(chunks[0],)], namespace="alice")
        engine.precompute(chunks[:2], namespace="bob")
        assert {(space.name, space.current): space.tiers["disk"].objects for space in engine.namespaces()} == {
            ("alice", True): 4,
            ("bob", True): 2,
            ("alice", False): 1,
            (None, False): 1,
        }
        dropped = engine.drop_namespace("alice")
        assert (dropped.objects, dropped.left, dropped.tiers["host"].objects) == (5, {}, 4)
        assert outcomes(engine, prompt, "alice") == {"miss"}
        assert engine.missing(chunks, namespace="alice") == chunks
        assert engine.missing(chunks[:2], namespace="bob") == []
        assert {space.name for space in engine.namespaces()} == {"bob", None}
        (unknown,) = [space for space in engine.namespaces() if space.name is None]
        assert engine.store.drop(unknown.tag).objects == 1
        assert engine.drop_namespace("nobody").tiers == {"host": Usage(), "disk": Usage()}
        with pytest.raises(InvalidInput, match="namespace"):
            engine.drop_namespace("")


def test_a_dropped_namespace_is_not_brought_back_by_what_came_before(model_of: ModelOf, tmp_path: Path) -> None:
    prompt = tiny.prompt()
    chunks = tiny.chunks_of(prompt)
    settings = {"store": config(tmp_path / "store"), "recompute_misses": True}
    with tiny.engine(model_of("llama"), tmp_path, **settings) as engine:
        engine.precompute(chunks[:1], namespace="alice")
        events = engine.stream(prompt, max_new_tokens=1, plan=REUSE, namespace="alice")
        engine.drop_namespace("alice")
        assert list(events)
        assert engine.wait_idle(30)
        assert engine.namespaces() == ()
        engine.prefill(prompt, REUSE, namespace="alice")
        assert engine.wait_idle(30)
        assert engine.missing(chunks, namespace="alice") == []


def test_quotas_are_enforced_by_name_and_shown(model_of: ModelOf, tmp_path: Path) -> None:
    prompt = tiny.prompt(chunks=4)
    chunks = tiny.chunks_of(prompt)
    with tiny.engine(model_of("llama"), tmp_path, store=config(tmp_path / "probe")) as engine:
        engine.precompute(chunks)
        (space,) = engine.namespaces()
        nbytes = space.tiers["disk"].nbytes
    quotas = (("alice", nbytes // 2), ("tiny", 5000))
    store = config(tmp_path / "store", tenant_quota_bytes=2 * nbytes, tenant_quotas=quotas)
    with tiny.engine(model_of("llama"), tmp_path, store=store) as engine:
        engine.precompute(chunks, namespace="bob")
        engine.precompute(chunks, namespace="alice")
        assert outcomes(engine, prompt, "bob") == {"hit"}
        assert outcomes(engine, prompt, "alice") == {"hit", "miss"}
        with pytest.raises(ResourceExhausted, match=r"quota of tenant 'tiny' .*5000 bytes"):
            engine.precompute(chunks[:1], namespace="tiny")
        shown = {(tenant.name, tenant.tier): tenant for tenant in engine.stats().tenants}
        assert set(shown) == {(name, tier) for name in ("alice", "bob") for tier in ("host", "disk")}
        for (name, _), tenant in shown.items():
            assert tenant.quota_bytes == (nbytes // 2 if name == "alice" else 2 * nbytes)
            assert 0 < tenant.used_bytes <= tenant.quota_bytes
        assert shown["bob", "disk"].used_bytes == nbytes
        assert {tenant["name"] for tenant in engine.stats().as_dict()["tenants"]} == {"alice", "bob"}
    with tiny.engine(model_of("llama"), tmp_path, store=store) as engine:
        (alice,) = [tenant for tenant in engine.stats().tenants if tenant.name == "alice" and tenant.tier == "disk"]
        assert alice.used_bytes == shown["alice", "disk"].used_bytes
