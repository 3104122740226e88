from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend.errors import InvalidInput
from blend.store import Namespace, ObjectKey, conditioned_variant, content_key, tenant_tag
from blend.store.key import check_tag, model_of, tenant_of

SECRET = b"sixteen bytes at least"
FINGERPRINT = "ab" * 16
tokens = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)


@given(tokens, tokens)
def test_equal_keys_mean_equal_tokens(one: list[int], other: list[int]) -> None:
    namespace = Namespace("t", FINGERPRINT, SECRET)
    assert (content_key(namespace, one) == content_key(namespace, other)) == (one == other)


@pytest.mark.parametrize(
    "other",
    [
        Namespace("u", FINGERPRINT, SECRET),
        Namespace("t", "ac" * 16, SECRET),
        Namespace("t", FINGERPRINT, SECRET + b"!"),
    ],
)
def test_nothing_crosses_a_namespace(other: Namespace) -> None:
    namespace = Namespace("t", FINGERPRINT, SECRET)
    assert content_key(namespace, [1, 2]) != content_key(other, [1, 2])
    assert namespace.digest != other.digest
    assert len(namespace.digest) == 32


@given(tokens)
def test_a_key_alone_tells_its_namespace(ids: list[int]) -> None:
    namespaces = [Namespace(t, f, SECRET) for t in ("t", "u") for f in (FINGERPRINT, "ac" * 16)]
    keys = [ObjectKey(content_key(namespace, ids), "plain") for namespace in namespaces]
    assert [key.namespace for key in keys] == [namespace.tag for namespace in namespaces]
    assert [key.tenant for key in keys] == [tenant_tag(SECRET, namespace.tenant) for namespace in namespaces]
    assert all(key.within(key.tenant) and key.within(key.namespace) for key in keys)
    assert keys[0].tenant == keys[1].tenant != keys[2].tenant
    assert [keys[0].within(key.namespace) for key in keys] == [True, False, False, False]
    # What stands before the tag depends on the whole namespace too.
    assert len({key.content[: -len(key.namespace)] for key in keys}) == len(keys)


def test_tags_say_nothing_without_the_secret() -> None:
    one, other = Namespace("t", FINGERPRINT, SECRET), Namespace("t", FINGERPRINT, SECRET + b"!")
    assert tenant_of(one.tag) != tenant_of(other.tag)
    assert model_of(one.tag) != model_of(other.tag)
    assert model_of(one.tag) == model_of(Namespace("u", FINGERPRINT, SECRET).tag)
    assert one.digest.hex().find(tenant_of(one.tag)) < 0
    assert not FINGERPRINT.startswith(model_of(one.tag))


@pytest.mark.parametrize("tag", ["", "a" * 11, "a" * 13, "a" * 17, "A" * 12, "g" * 12, "a" * 40, None])
def test_other_texts_are_no_tags(tag: str) -> None:
    assert check_tag("tag", "0f" * 6) == "0f" * 6
    assert check_tag("tag", "0f" * 9) == "0f" * 9
    with pytest.raises(InvalidInput, match="tag"):
        check_tag("tag", tag)


def test_parts_of_a_namespace_are_not_run_together() -> None:
    one = Namespace("t" + "ab" * 8, "cd" * 16, SECRET)
    other = Namespace("t", "ab" * 8 + "cd" * 16, SECRET)
    assert one.digest != other.digest


def test_a_secret_is_not_shown() -> None:
    assert "sixteen" not in repr(Namespace("t", FINGERPRINT, SECRET))


@pytest.mark.parametrize("ids", [[], [-1], [2**32], ["a"], [1.5]])
def test_bad_token_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidInput, match="token_ids"):
        content_key(Namespace("t", FINGERPRINT, SECRET), ids)


@pytest.mark.parametrize(
    ("tenant", "fingerprint", "secret"),
    [
        ("t", "xyz", SECRET),
        ("t", "AB" * 16, SECRET),
        ("t", FINGERPRINT, b"short"),
        ("t" * 257, FINGERPRINT, SECRET),
        ("\ud800", FINGERPRINT, SECRET),
    ],
)
def test_bad_namespaces_are_refused(tenant: str, fingerprint: str, secret: bytes) -> None:
    with pytest.raises(InvalidInput, match="namespace"):
        Namespace(tenant, fingerprint, secret)


def test_a_conditioned_variant_depends_on_its_neighbours_and_their_order() -> None:
    one, other = "1" * 40, "2" * 40
    variants = [conditioned_variant(n) for n in ([one], [other], [one, other], [other, one], [one, one])]
    assert len(set(variants)) == len(variants)
    assert all(ObjectKey(one, variant).conditioned for variant in variants)
    assert not ObjectKey(one, "plain").conditioned
    for wrong in ([], ["not a key"]):
        with pytest.raises(InvalidInput, match="neighbours"):
            conditioned_variant(wrong)


@given(st.binary(min_size=20, max_size=20), st.one_of(st.just("plain"), st.binary(min_size=8, max_size=8)))
def test_object_keys_round_trip_as_text(content: bytes, variant: str | bytes) -> None:
    key = ObjectKey(content.hex(), variant if isinstance(variant, str) else "c" + variant.hex())
    assert ObjectKey.parse(str(key)) == key
    assert set(str(key)) <= set("0123456789abcdefplin.")


CONTENT = "a" * 40


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "plain",
        CONTENT,
        CONTENT + ".",
        CONTENT + ".other",
        CONTENT + ".c123",
        CONTENT + ".c" + "g" * 16,
        CONTENT + ".plain\n",
        CONTENT + ".plain.tmp",
        CONTENT[1:] + ".plain",
        CONTENT.upper() + ".plain",
        "../" + CONTENT[3:] + ".plain",
    ],
)
def test_other_texts_are_no_keys(text: str) -> None:
    with pytest.raises(InvalidInput, match="key"):
        ObjectKey.parse(text)


def test_object_keys_are_ordered() -> None:
    keys = [ObjectKey("b" * 40, "plain"), ObjectKey("a" * 40, "plain"), ObjectKey("a" * 40, "c" + "0" * 16)]
    assert sorted(keys) == [keys[2], keys[1], keys[0]]
