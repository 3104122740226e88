"""Tokens and access files: what they say, what is refused, and how."""

from __future__ import annotations

import stat
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from blend.errors import InvalidConfig, InvalidInput
from blend_server import access, tokens
from blend_server.access import TenantQuotas
from blend_server.tokens import Hash

HASH = str(Hash.of("secret", cost=2))
TOKEN = {"id": "a", "hash": HASH, "tenant": "acme", "role": "reader"}


def parse(**entries: object) -> access.Access:
    return access.parse(yaml.safe_dump(entries))


# --------------------------------------------------------------------------------------------------- tokens


def test_a_token_has_an_id_and_a_secret_that_its_hash_knows() -> None:
    token, hashed = tokens.make("loader-1")
    parts = tokens.split(token)
    assert parts is not None
    name, secret = parts
    assert name == "loader-1"
    assert len(secret) == 43
    assert hashed.matches(secret)
    assert not hashed.matches(secret[:-1])
    assert Hash.parse(str(hashed)) == hashed
    assert secret not in str(hashed)


def test_no_two_tokens_or_salts_are_alike() -> None:
    assert tokens.make("a")[0] != tokens.make("a")[0]
    assert str(Hash.of("same", cost=2)) != str(Hash.of("same", cost=2))


@pytest.mark.parametrize(
    "text", ["", "blend", "blend.a", "blend.a.", "other.a.s", "blend.A.s", "blend..s", "blend.a.ü"]
)
def test_what_is_no_token(text: str) -> None:
    assert tokens.split(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "secret",
        HASH.replace("scrypt$2$", "scrypt$3$"),
        HASH.replace("scrypt$2$", "scrypt$262144$"),
        HASH.replace("$8$1$", "$17$1$"),
        HASH.replace("$8$1$", "$8$9$"),
        HASH.replace("$2$", "$0$"),
        HASH[:-1],
        HASH + "A",
    ],
)
def test_a_hash_that_cannot_be_checked_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        Hash.parse(text)
    assert HASH[-20:] not in str(raised.value)


def test_the_command_prints_an_entry_and_keeps_the_token_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "token"
    arguments = ["--id", "ops", "--tenant", "acme", "--role", "admin", "--days", "30", "--out", str(out)]
    assert tokens.main(arguments) == 0
    token = out.read_text().strip()
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    printed = capsys.readouterr()
    assert token.rpartition(".")[2] not in printed.out + printed.err
    entry = access.parse("tokens:\n" + printed.out).tokens["ops"]
    assert (entry.tenant, entry.role) == ("acme", "admin")
    assert entry.expires is not None
    assert 29 <= (entry.expires - datetime.now(timezone.utc)).days <= 30
    parts = tokens.split(token)
    assert parts is not None
    assert entry.hash.matches(parts[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--id", "Ops"], "lower-case"),
        (["--id", "ops", "--tenant", "../x"], "--tenant"),
        (["--id", "ops", "--days", "0"], "--days"),
    ],
)
def test_the_command_refuses_what_no_entry_can_be(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokens.main([*arguments, "--out", str(tmp_path / "token")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "token").exists()


def test_the_command_overwrites_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "token"
    out.write_text("precious")
    assert tokens.main(["--id", "ops", "--out", str(out)]) == 2
    assert out.read_text() == "precious"
    assert "allowed: a file that is not there yet" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- file


def test_a_file_says_who_may_call_and_what_tenants_may_have() -> None:
    found = parse(
        quotas={"documents": 10, "bytes": "1MiB"},
        tenants={"acme": {"bytes": 5, "requests": 2}},
        certificates=[{"name": "search.acme.example", "tenant": "acme", "role": "reader"}],
        tokens=[TOKEN, {**TOKEN, "id": "b", "role": "writer", "expires": datetime(2030, 1, 1, tzinfo=timezone.utc)}],
    )
    assert found.tokens["a"].hash.matches("secret")
    assert found.tokens["a"].expires is None
    assert found.tokens["b"].expires == datetime(2030, 1, 1, tzinfo=timezone.utc)
    assert found.certificates["search.acme.example"].role == "reader"
    assert found.quotas("acme") == TenantQuotas(10, 5, 2)
    assert found.quotas("other") == TenantQuotas(10, 1 << 20, None)


def test_a_day_expires_at_its_beginning_in_utc() -> None:
    text = f"tokens: [{{id: a, hash: {HASH}, tenant: t, role: reader, expires: 2030-01-01}}]"
    assert access.parse(text).tokens["a"].expires == datetime(2030, 1, 1, tzinfo=timezone.utc)


def test_an_empty_file_lets_nobody_in() -> None:
    assert access.parse("") == access.Access()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"token": []}, "token"),
        ({"tokens": {}}, "a list"),
        ({"tokens": [{"id": "a"}]}, "no field hash"),
        ({"tokens": [{**TOKEN, "role": "root"}]}, "reader"),
        ({"tokens": [{**TOKEN, "id": "a b"}]}, "token id"),
        ({"tokens": [TOKEN, TOKEN]}, "each id once"),
        ({"tokens": [{**TOKEN, "tenant": "../default"}]}, "token a: tenant"),
        ({"tokens": [{**TOKEN, "tenant": "x" * 64}]}, "token a: tenant"),
        ({"tokens": [{**TOKEN, "expires": "soon"}]}, "token a: expires"),
        ({"tokens": [{**TOKEN, "secret": "s"}]}, "secret"),
        ({"tenants": {"A": {}}}, "tenant"),
        ({"tenants": {"a": {"bytes": "many"}}}, "size"),
        ({"tenants": {"a": {"documents": -1}}}, "tenants.a.documents"),
        ({"quotas": {"requests": 0}}, "quotas.requests"),
        ({"certificates": [{"name": "", "tenant": "t", "role": "reader"}]}, "certificate name"),
        ({"certificates": [{"name": "x", "tenant": "t", "role": "reader"}] * 2}, "each name once"),
    ],
)
def test_a_file_that_says_what_is_not_allowed_is_refused(entries: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        parse(**entries)
    assert message in str(raised.value)
    assert "access_file" in raised.value.field
    assert HASH[-20:] not in str(raised.value)


@pytest.mark.parametrize("text", ["tokens: [", "a: &a [*a", "\ttokens", "!!python/object/apply:os.system ['true']"])
def test_what_is_no_yaml_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="YAML"):
        access.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "tokens: [{token}]",
        "tokens: [{{id: a, hash: '{token}', tenant: t, role: reader}}]",
        "tokens: [{{id: '{token}', hash: h, tenant: t, role: reader}}]",
        "tokens: {{'{token}': x}}",
        "'{token}': x",
        "{token}",
        "tokens: ['{token}",
    ],
)
def test_a_token_in_the_wrong_place_is_not_shown(text: str) -> None:
    token, _ = tokens.make("a")
    with pytest.raises(InvalidConfig) as raised:
        access.parse(text.format(token=token))
    assert token.rpartition(".")[2] not in str(raised.value)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(InvalidConfig):
        access.parse(text)


@pytest.mark.parametrize("mode", [0o622, 0o660, 0o666])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "access.yaml"
    path.write_text("tokens: []")
    path.chmod(mode)
    with pytest.raises(InvalidConfig, match="only its owner may write"):
        access.read(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="No such file"):
        access.read(tmp_path / "none")
    with pytest.raises(InvalidConfig):
        access.read(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfig, match="UTF-8"):
        access.read(tmp_path / "latin")
