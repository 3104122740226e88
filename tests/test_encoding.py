"""Chunks encoded behind others: their sensitivity, the one variant that is kept, what it was encoded behind."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blend import Chunk, Engine, Part, Plan, Prompt, StoreConfig, Text, encoding
from blend import engine as engines
from blend.encoding import Encoder, Mean, contexts, with_sensitivity
from blend.errors import PromptTooLong, TierUnavailable
from blend.recompute import passes, prefill
from blend.recompute.budget import Budget
from blend.recompute.canvas import Canvas
from blend.recompute.prefill import Outcome, Repair
from blend.recompute.rope import Pairing, Rotation
from blend.recompute.select import Blend
from blend.store import DiskTier, Header, HostTier, ObjectKey, layout
from tests import tiny
from tests.store.helpers import make

CHUNK, ONE, TWO = (Chunk(tiny.random_ids(length, length)) for length in (40, 23, 31))
NEAR = tuple(Chunk(tiny.random_ids(length, length)) for length in (11, 26, 17, 21, 14))
"""Three contexts: behind the last two, the two before them, and the first one."""
QUESTION = Text(tiny.random_ids(9, 3))


@pytest.fixture(scope="module", params=["llama", "gemma3", "smollm3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Engine]:
    with tiny.engine(model, tmp_path) as made:
        yield made


class Watching(Repair):
    """Keeps what selectors are given, and prefills the prompt in full."""

    name, ratio = "watching", 0.0
    blend: Blend

    def __call__(self, blend: Blend, budget: Budget) -> Outcome:
        self.blend = blend
        logits = passes.everything(blend.decoder, blend.canvas, blend.token_ids, blend.max_rows)
        return Outcome(logits, prefill.nothing(blend), torch.arange(len(blend.token_ids)), 0.0, 0.0)


def given(engine: Engine, *segments: Chunk | Part | Text) -> torch.Tensor | None:
    """The sensitivity that selectors are given of a prompt."""
    watching = Watching()
    engine.prefill(Prompt(segments), Plan("reuse"), repair=watching)
    return watching.blend.sensitivity


def header_of(engine: Engine, chunk: Chunk) -> Header:
    """Of the conditioned variant where there is one."""
    key = engine.store.resolve(engine.content_key(chunk), "best")
    assert key is not None
    (header,) = engine.store.headers([key])
    return header


def values(header: Header) -> torch.Tensor:
    """A header's sensitivity ``[L, T]``."""
    found = np.frombuffer(header.sensitivity, "<f2").reshape(header.layers, header.tokens)
    return torch.from_numpy(found.astype(np.float32))


def behind_all(engine: Engine, chunk: Chunk, before: Sequence[Chunk]) -> torch.Tensor:
    """A chunk's KV ``[L, 2, KVH, T, D]`` behind these, by one pass."""
    ids = torch.tensor([*engine.sink, *(t for other in before for t in other.token_ids), *chunk.token_ids])
    canvas = engine.decoder.new_canvas(len(ids))
    passes.everything(engine.decoder, canvas, ids, max_rows=7)
    return torch.stack((canvas.k, canvas.v), dim=1)[:, :, :, -len(chunk) :].clone()


def by_hand(engine: Engine, chunk: Chunk, *behind: Sequence[Chunk]) -> torch.Tensor:
    """How far each token's values move, ``[L, T]``, in the mean over these contexts."""
    values = torch.stack([behind_all(engine, chunk, before)[:, 1] for before in behind]).mean(0)
    return (values - behind_all(engine, chunk, ())[:, 1]).transpose(1, 2).flatten(2).norm(dim=-1)


def turned_by_hand(engine: Engine, keys: torch.Tensor, shift: int) -> torch.Tensor:
    """Keys ``[L, KVH, T, D]`` so many positions later, by a rotation matrix for each pair, in float64."""
    found = keys.double()
    for layer, rotation in enumerate(engine.decoder.rotations):
        if rotation is None:
            continue
        pairs = len(rotation.inverse_frequencies)
        turn = torch.eye(keys.shape[-1], dtype=torch.float64)
        for pair, frequency in enumerate(rotation.inverse_frequencies.tolist()):
            i, j = (pair, pair + pairs) if rotation.pairing == "half" else (2 * pair, 2 * pair + 1)
            sin, cos = math.sin(frequency * shift), math.cos(frequency * shift)
            turn[i, i], turn[i, j], turn[j, i], turn[j, j] = cos, -sin, sin, cos
        found[layer] = found[layer] @ turn.T
    return found


def kv_of(engine: Engine, chunk: Chunk) -> torch.Tensor:
    """The stored KV ``[L, 2, KVH, T, D]`` of a chunk, of the conditioned variant where there is one."""
    lease = engine.store.get(header_of(engine, chunk).key)
    assert lease is not None
    with lease:
        layers, heads, tokens, dim = lease.header.shape
        found = torch.frombuffer(bytearray(lease.payload()), dtype=engine.decoder.dtype)
    return found.view(layers, 2, heads, tokens, dim)


def test_neighbours_come_two_at_a_time_from_the_nearest_on() -> None:
    one, two, three, four, five = NEAR
    assert contexts(NEAR) == [(four, five), (two, three), (one,)]
    assert contexts(NEAR[1:]) == [(four, five), (two, three)]
    assert contexts([one, two]) == [[one, two]] and contexts([one]) == [[one]]
    assert contexts(()) == [()]


@pytest.mark.parametrize("pairing", [None, "half", "interleaved"])
def test_what_is_stored_is_the_mean_over_the_contexts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, pairing: Pairing | None
) -> None:
    if pairing is not None:  # as of a model whose keys turn in part
        made_up = Rotation(torch.tensor([0.9, 0.2, 0.03]), pairing)
        monkeypatch.setattr(engine.decoder, "rotations", (made_up, None, made_up, made_up))
    engine.precompute([CHUNK], behind=[NEAR])
    header, got = header_of(engine, CHUNK), kv_of(engine, CHUNK)
    assert header.position == len(engine.sink) + len(NEAR[3]) + len(NEAR[4])
    assert header.neighbours == tuple(map(engine.content_key, NEAR))
    groups = (NEAR[3:], NEAR[1:3], NEAR[:1])
    alone = [behind_all(engine, CHUNK, group) for group in groups]
    at = [len(engine.sink) + sum(map(len, group)) for group in groups]
    keys = [turned_by_hand(engine, kv[:, 0], at[0] - own) for kv, own in zip(alone, at, strict=True)]
    torch.testing.assert_close(got[:, 0], torch.stack(keys).mean(0).float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[:, 1], torch.stack([kv[:, 1] for kv in alone]).mean(0), rtol=1e-4, atol=1e-5)
    assert float((got - alone[0]).abs().max()) > 0.01, "not the first of them"
    want = by_hand(engine, CHUNK, *groups)
    torch.testing.assert_close(values(header), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("others", [(ONE,), (ONE, TWO)], ids=len)
def test_one_context_is_what_one_pass_gives_bit_for_bit(engine: Engine, others: tuple[Chunk, ...]) -> None:
    engine._chunks.encode(CHUNK, "default", others)
    assert torch.equal(kv_of(engine, CHUNK), engine._chunks._encoder.kv(CHUNK, others))
    assert header_of(engine, CHUNK).position == len(engine.sink) + sum(map(len, others))


def test_the_mean_is_cast_once(model: Path, tmp_path: Path) -> None:
    with tiny.engine(model, tmp_path, dtype="bfloat16") as engine:
        engine.precompute([CHUNK], behind=[NEAR])
        alone = [behind_all(engine, CHUNK, group)[:, 1].float() for group in (NEAR[3:], NEAR[1:3], NEAR[:1])]
        got = kv_of(engine, CHUNK)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got[:, 1], (sum(alone) / 3).to(torch.bfloat16), rtol=2**-6, atol=2**-6)


def test_slice_by_slice_is_the_same_as_in_one_go(model: Path, tmp_path: Path) -> None:
    with tiny.engine(model, tmp_path, max_rows=1000) as engine:
        engine._chunks.encode(CHUNK, "default", NEAR)
        whole, position = kv_of(engine, CHUNK), header_of(engine, CHUNK).position
        engine.forget([CHUNK])
        engine.precompute([CHUNK], behind=[NEAR])
        assert header_of(engine, CHUNK).position == position
        torch.testing.assert_close(kv_of(engine, CHUNK), whole, rtol=1e-4, atol=1e-5)


def test_one_canvas_is_held_at_a_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    canvases: list[weakref.ref[torch.Tensor]] = []
    new_canvas = engine.decoder.new_canvas

    def counted(length: int) -> Canvas:
        assert not any(k() is not None for k in canvases)
        canvas = new_canvas(length)
        canvases.append(weakref.ref(canvas.k))
        return canvas

    monkeypatch.setattr(engine.decoder, "new_canvas", counted)
    engine.precompute([CHUNK], behind=[NEAR])
    assert len(canvases) == 4, "three contexts and the plain variant"
    assert len(engine.behind(CHUNK)) == len(NEAR)


def test_a_context_is_all_that_has_to_fit(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model", max_position_embeddings=64)
    with tiny.engine(model, tmp_path / "store") as engine:
        fits, one_more = (tuple(Chunk(tiny.random_ids(n, n + at)) for at in range(4)) for n in (11, 12))
        engine.precompute([CHUNK], behind=[fits])
        assert len(engine.behind(CHUNK)) == 4
        with pytest.raises(PromptTooLong, match="65"):
            engine.precompute([CHUNK], behind=[(*one_more[:2], *fits[:2])])
        assert engine.longest_neighbour(len(CHUNK)) == 11
        assert engine.longest_neighbour(63) == 0


def test_another_size_of_contexts_is_another_key(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another version encoded behind more at a time is not taken for it."""
    seen = []
    for size in (2, 3):
        monkeypatch.setattr(encoding, "CONTEXT", size)
        monkeypatch.setattr(engines, "CONTEXT", size)
        with tiny.engine(model, tmp_path) as engine:
            assert engine.behind(CHUNK) == ()
            engine.precompute([CHUNK], behind=[NEAR])
            seen.append(header_of(engine, CHUNK))
    assert len({header.key.variant for header in seen}) == len({header.key.content for header in seen}) == 2
    assert seen[0].position < seen[1].position


@pytest.mark.parametrize("plain", ["in memory", "on disk", "corrupt", "not stored"])
def test_it_is_stored_how_far_each_tokens_values_moved(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: str
) -> None:
    host, disk = engine.store.tiers
    key = ObjectKey(engine.content_key(CHUNK), "plain")
    if plain != "not stored":
        engine.precompute([CHUNK])
        assert header_of(engine, CHUNK).sensitivity == b"", "what is encoded behind the sink alone has none"
    if plain in ("on disk", "corrupt"):
        assert host.remove(key)
    if plain == "corrupt":
        (path,) = [path for path in tmp_path.rglob("*") if path.name == str(key)]
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    encoded: list[int] = []
    prepare = Encoder.prepare

    def counted(encoder: Encoder, chunk: Chunk, behind: Sequence[Chunk] = ()) -> Any:
        encoded.append(len(behind))
        return prepare(encoder, chunk, behind)

    monkeypatch.setattr(Encoder, "prepare", counted)
    engine.precompute([CHUNK], behind=[(ONE, TWO)])
    assert encoded == ([2] if plain in ("in memory", "on disk") else [2, 0])
    want = by_hand(engine, CHUNK, (ONE, TWO))
    assert float(want[1:].min()) > 0
    torch.testing.assert_close(values(header_of(engine, CHUNK)), want, rtol=1e-3, atol=1e-4)
    assert disk.contains(header_of(engine, CHUNK).key)


def test_selectors_are_given_it_where_chunks_stand(engine: Engine) -> None:
    engine.precompute([ONE, TWO, CHUNK])
    before, between = Text((1, 5, 6)), Text((7,))
    assert given(engine, before, CHUNK, QUESTION) is None
    engine.precompute([CHUNK, TWO], behind=[(ONE,), (CHUNK, ONE)])
    own, other = values(header_of(engine, CHUNK)), values(header_of(engine, TWO))
    found = given(engine, before, Part(CHUNK, 4, 33), between, ONE, TWO, QUESTION)
    assert found is not None and found.dtype == torch.float32
    assert found.shape == (engine.decoder.layers, 3 + 29 + 1 + len(ONE) + len(TWO) + 9)
    blank, part, gap, plain, whole, question = found.split([3, 29, 1, len(ONE), len(TWO), 9], dim=1)
    assert torch.equal(part, own[:, 4:33])
    assert torch.equal(whole, other)
    mean = torch.cat((part, whole), dim=1).mean(dim=1, keepdim=True)
    torch.testing.assert_close(plain, mean.expand_as(plain))
    assert not any(part.any() for part in (blank, gap, question))


def test_selectors_are_given_nothing_for_a_token_that_is_not_loaded(engine: Engine) -> None:
    engine.precompute([CHUNK, TWO], behind=[(ONE,), (ONE,)])
    own = values(header_of(engine, CHUNK))
    found = given(engine, Text((1, 5)), ONE, CHUNK)  # its last token's logits are wanted: it is computed
    assert found is not None
    assert torch.equal(found[:, -len(CHUNK) : -1], own[:, :-1])
    assert not found[:, -1].any()
    assert not found[:, 2 : 2 + len(ONE)].any(), "a chunk that is not stored is computed"


def test_a_sensitivity_that_no_header_has_room_for_is_left_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    long = Chunk(tiny.random_ids(600, 5))
    monkeypatch.setattr(layout, "MAX_HEADER_NBYTES", 4096)
    engine.precompute([long], behind=[(ONE,)])
    assert header_of(engine, long).sensitivity == b""
    assert engine.behind(long) == (engine.content_key(ONE),)
    assert given(engine, Text((1, 5)), long, QUESTION) is None


@pytest.mark.parametrize(
    ("value", "stored"), [(float("nan"), None), (float("inf"), 65504.0), (1e6, 65504.0), (0.5, 0.5)]
)
def test_values_beyond_what_is_stored(value: float, stored: float | None) -> None:
    header, _ = make(1, neighbours=["5" * 40])
    made = with_sensitivity(header, torch.full((header.layers, header.tokens), value))
    if stored is None:
        assert made == header
    else:
        assert torch.equal(values(made), torch.full((header.layers, header.tokens), stored))


def test_a_chunk_has_one_conditioned_variant(engine: Engine) -> None:
    key = engine.content_key(CHUNK)
    engine.precompute([CHUNK])
    seen = set()
    for behind in ((ONE,), (ONE, TWO), (TWO,), (ONE,)):
        engine.precompute([CHUNK], behind=[behind])
        names = tuple(engine.content_key(other) for other in behind)
        for tier in engine.store.tiers:
            conditioned, plain = tier.variants(key)
            assert plain == "plain"
        assert header_of(engine, CHUNK).neighbours == engine.behind(CHUNK) == names
        seen.add(conditioned)
    assert len(seen) == 3


def test_a_variant_that_is_replaced_is_read_to_the_end_by_who_holds_it(engine: Engine) -> None:
    engine.precompute([CHUNK], behind=[(ONE,)])
    before = header_of(engine, CHUNK)
    lease = engine.store.get(before.key)
    assert lease is not None
    with lease:
        engine.precompute([CHUNK], behind=[(TWO,)])
        assert not engine.store.contains(before.key)
        before.verify(lease.payload())


def test_a_variant_that_the_fastest_tier_does_not_take_replaces_another_once_it_is_written(
    model: Path, tmp_path: Path
) -> None:
    store = StoreConfig(host_bytes=4096, disk_bytes=64 << 20, directory=tmp_path, fsync=False)
    with tiny.engine(model, tmp_path, store=store) as engine:
        _, disk = engine.store.tiers
        for other in (ONE, TWO):
            engine.precompute([CHUNK], behind=[(other,)])
            assert engine.store.wait_idle(30)
            assert len(disk.variants(engine.content_key(CHUNK))) == 1
            assert engine.behind(CHUNK) == (engine.content_key(other),)


def test_variants_of_other_tenants_and_chunks_stay(engine: Engine) -> None:
    engine.precompute([CHUNK, TWO], behind=[(ONE,), (ONE,)])
    engine.precompute([CHUNK], behind=[(ONE,)], namespace="other")
    engine.precompute([CHUNK], behind=[(TWO,)])
    assert engine.behind(CHUNK) == (engine.content_key(TWO),)
    assert engine.behind(TWO) == (engine.content_key(ONE),)
    assert engine.behind(CHUNK, namespace="other") == (engine.content_key(ONE, namespace="other"),)


def test_a_variant_that_no_tier_takes_replaces_none(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.precompute([CHUNK], behind=[(ONE,)])
    with monkeypatch.context() as patch:
        for tier in (HostTier, DiskTier):
            patch.setattr(tier, "start", _fails)
        with pytest.raises(TierUnavailable, match="EIO"):
            engine.precompute([CHUNK], behind=[(TWO,)])
    assert engine.behind(CHUNK) == (engine.content_key(ONE),)


def test_what_a_chunk_was_encoded_behind(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.behind(CHUNK) == ()
    engine.precompute([CHUNK, ONE])
    assert engine.behind(CHUNK) == ()
    engine.precompute([CHUNK], behind=[(TWO, ONE)])
    names = (engine.content_key(TWO), engine.content_key(ONE))
    assert engine.behind(CHUNK) == names
    assert engine.behind(CHUNK, namespace="other") == ()
    host, _ = engine.store.tiers
    assert host.remove(header_of(engine, CHUNK).key)
    for method in ("variants", "headers"):
        with monkeypatch.context() as patch:
            patch.setattr(DiskTier, method, _fails)
            assert engine.behind(CHUNK) == ()
    assert engine.behind(CHUNK) == names
    engine.forget([ONE])
    assert engine.behind(CHUNK) == ()


def _fails(*_: Any, **__: Any) -> None:
    raise TierUnavailable("disk: EIO (Input/output error)")


def test_what_is_forgotten_while_a_chunk_is_encoded_behind_others_does_not_come_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is the chunk itself or one of the others: it is encoded slice by slice, and others have their turn."""
    engine.precompute([CHUNK, ONE])
    for gone in (CHUNK, ONE):
        begin = engine._keeping._chunks.prepare

        def prepared(*what: Any, gone: Chunk = gone, begin: Any = begin) -> Any:
            found = begin(*what)
            engine._keeping.misses.forget([engine.content_key(gone)])  # as a call that comes now does in this thread
            return found

        with monkeypatch.context() as patch:
            patch.setattr(engine._keeping._chunks, "prepare", prepared)
            engine.precompute([CHUNK], behind=[[ONE]])
        assert engine.behind(CHUNK) == ()
    engine.precompute([CHUNK], behind=[[ONE]])
    assert engine.behind(CHUNK) == (engine.content_key(ONE),)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_what_is_forgotten_between_two_contexts_does_not_come_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """One of a context that is still to come, or was computed already."""
    engine.precompute([CHUNK, *NEAR])
    add, added = Mean.add, list[Sequence[Chunk]]()

    def adding(mean: Mean, context: Sequence[Chunk], canvas: Canvas) -> None:
        add(mean, context, canvas)
        added.append(context)
        if len(added) == after:
            engine._keeping.misses.forget([engine.content_key(NEAR[2])])  # as a call that comes now does in this thread

    monkeypatch.setattr(Mean, "add", adding)
    engine.precompute([CHUNK], behind=[NEAR])
    assert engine.behind(CHUNK) == () and len(added) == 3
    engine.precompute([CHUNK], behind=[NEAR])
    assert len(engine.behind(CHUNK)) == len(NEAR)


def test_others_have_their_turn_while_a_chunk_is_encoded_behind_others(model: Path, tmp_path: Path) -> None:
    with tiny.engine(model, tmp_path, max_rows=16) as engine:
        passed: list[int] = []
        forward = engine.decoder.forward

        def counted(rows: Any, **how: Any) -> Any:
            passed.append(sum(map(len, rows)))
            return forward(rows, **how)

        object.__setattr__(engine.decoder, "forward", counted)
        engine.precompute([CHUNK])
        whole = engine.store.get(ObjectKey(engine.content_key(CHUNK), "plain"))
        assert whole is not None
        whole.release()
        passed.clear()
        engine.precompute([CHUNK], behind=[[*NEAR, ONE, TWO]])
        assert len(passed) > 4 and max(passed) <= 16
        assert sum(passed) == 4 * (len(engine.sink) + len(CHUNK)) + sum(map(len, (*NEAR, ONE, TWO)))
