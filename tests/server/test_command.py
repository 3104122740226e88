"""The command blend-client: output, JSON, messages and exit status."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from blend.errors import TierUnavailable
from blend.store import DiskTier
from blend.types import Answer, ChunkReport, Report, Timings
from blend_server.client import Client, connection, main, show
from blend_server.client.show import milliseconds, ranges, safe, size
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.server import BlendServer


class Run:
    """Runs the command against the tiny model's server."""

    def __init__(self, address: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.address = address
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        status = main([*arguments, "--address", self.address])
        captured = self._capsys.readouterr()
        return status, captured.out, captured.err

    def json(self, *arguments: str) -> list[Any]:
        """The lines of standard output, decoded."""
        status, out, err = self(*arguments, "--json")
        assert status == 0, err
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def run(tiny_server: BlendServer, client: Client, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(tiny_server.address, capsys)


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory ``docs`` with two files, in the current directory."""
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    Path("docs/ferry.md").write_text("# The ferry\n\nIt leaves at nine from the north pier.\n")
    Path("docs/light.txt").write_text("The lighthouse was built in 1888.\n")
    return tmp_path / "docs"


def test_files_go_in_and_are_listed_and_go_out(run: Run, docs: Path) -> None:
    status, out, _ = run("ingest", "docs")
    assert status == 0
    assert "stored     docs/ferry.md (1 chunk)" in out
    assert "\n0 of 2 chunks were reused, 2 computed.\n2 stored in" in out

    status, out, _ = run("ingest", "docs/ferry.md", "docs")
    assert (status, out.splitlines()[-1].startswith("2 unchanged in")) == (0, True)
    assert out.splitlines()[-2] == "2 of 2 chunks were reused, 0 computed."

    status, out, _ = run("documents")
    assert status == 0
    assert out.splitlines()[0].startswith("docs/ferry.md  The ferry  1 chunk")

    status, out, _ = run("delete", "docs/ferry.md")
    assert (status, out) == (0, "deleted    docs/ferry.md (1 chunk dropped)\n")
    assert [d["id"] for d in run.json("documents")] == ["docs/light.txt"]


def test_an_ingestion_tells_what_it_could_reuse(run: Run, docs: Path) -> None:
    run("ingest", "docs/ferry.md")
    same = Path("docs/ferry.md").read_text()
    Path("docs/again.md").write_text(same)
    Path("docs/longer.md").write_text(same + "It carries forty cars, and in summer a band plays on deck. " * 4)
    _, out, _ = run("ingest", "docs/again.md")
    assert out.startswith(
        "stored     docs/again.md (1 chunk, 1 reused)\n1 of 1 chunk was reused, 0 computed.\n1 stored"
    )
    (line,) = run.json("ingest", "docs/longer.md")
    counts = line["stored"]
    assert counts["chunks"] == counts["computed_chunks"] + counts["reused_chunks"]
    assert counts["computed_chunks"] > 0
    (line,) = run.json("ingest", "docs/longer.md")
    assert line["unchanged"] == {"chunks": counts["chunks"], "computed_chunks": 0, "reused_chunks": counts["chunks"]}
    _, out, _ = run("ingest", "missing.md")
    assert "reused" not in out


def test_what_fails_is_named_and_the_rest_goes_in(run: Run, docs: Path) -> None:
    Path("docs/latin.txt").write_bytes("café".encode("latin-1"))
    Path("docs/empty.md").touch()
    status, out, err = run("ingest", "docs", "missing.md")
    assert status == 1
    assert "2 stored, 3 failed in" in out
    assert "docs/latin.txt: text: got 'byte 0xe9" in err
    assert "docs/empty.md" in err
    assert "no such file: 'missing.md'" in err


def test_ingestion_as_json_has_one_line_a_document(run: Run, docs: Path) -> None:
    Path("docs/empty.md").touch()
    status, out, err = run("ingest", "docs", "missing.md", "--json")
    assert (status, err) == (1, "")
    by_id = {line["document_id"]: line for line in map(json.loads, out.splitlines())}
    assert by_id["docs/ferry.md"]["stored"]["chunks"] == 1
    assert by_id["docs/empty.md"]["failed"]["code"] == "INVALID_ARGUMENT"
    assert "no such file" in by_id["missing.md"]["failed"]["message"]
    assert len(by_id) == 4


def test_a_name_that_is_not_unicode_fails_alone(run: Run, docs: Path) -> None:
    try:
        Path(os.fsdecode(b"docs/caf\xe9.txt")).write_text("text")
    except OSError:
        pytest.skip("this file system has no such names")
    status, out, err = run("ingest", "docs")
    assert status == 1
    assert "2 stored, 1 failed" in out
    assert "docs/caf?.txt" in err


def test_an_empty_directory_is_a_mistake(run: Run, tmp_path: Path) -> None:
    status, _, err = run("ingest", str(tmp_path))
    assert status == 2
    assert "no .md, .markdown, .txt files in" in err


def test_an_answer_for_people(run: Run, docs: Path) -> None:
    run("ingest", "docs")
    arguments = ["--method", "query", "--ratio", "0.2", "--compare-full", "--details", "--positions", "--passages"]
    status, out, err = run("ask", "When does the ferry leave?", "-k", "1", *arguments)
    assert (status, err) == (0, "")
    assert "docs/ferry.md #0  The ferry" in out
    assert "It leaves at nine from the north pier." in out
    for label in ("mode", "tokens", "recomputed", "served", "first token", "spent on", "fidelity", "positions"):
        assert f"\n{label} " in out
    assert "query (as asked)" in out
    assert re.search(r"\nspent on +retrieve \d+\.\d, queue \d", out)
    assert "0.200 asked for" in out
    assert "(measured)" in out


def test_an_answer_has_its_report_in_one_line(run: Run, docs: Path) -> None:
    run("ingest", "docs")
    _, out, _ = run("ask", "When does the ferry leave?", "--method", "query", "-k", "1", "--compare-full")
    (line,) = [line for line in out.splitlines() if line.startswith("TTFT ")]
    parts = [part.split()[0] for part in line.split(" | ")]
    assert parts == ["TTFT", "full", "speed-up", "query,", "chunks:", "first-token"]
    _, out, _ = run("ask", "When does the ferry leave?", "--method", "reuse", "-k", "1")
    (line,) = [line for line in out.splitlines() if line.startswith("TTFT ")]
    assert "(estimated)" in line and "KL" not in line


def test_an_answer_as_json_is_one_object_with_the_protocols_names(run: Run, docs: Path) -> None:
    run("ingest", "docs")
    (found,) = run.json("ask", "When does the ferry leave?", "--method", "query", "--order-seed", "3", "-k", "2")
    assert sorted(p["document_id"] for p in found["passages"]) == ["docs/ferry.md", "docs/light.txt"]
    assert found["retrieve_ms"] > 0
    report = found["answer"]["report"]
    assert found["answer"]["finish_reason"] in {"stop", "length"}
    assert report["mode"] == "query"
    assert [chunk["outcome"] for chunk in report["chunks"]] == ["hit", "hit"]
    assert report["timings"]["first_token_ms"] > 0
    assert report["comparison"] is None


def test_stats(run: Run, docs: Path) -> None:
    run("ingest", "docs")
    status, out, _ = run("stats")
    assert status == 0
    assert "2 documents, 2 chunks" in out
    assert "tier disk" in out
    (found,) = run.json("stats")
    assert found["corpus"]["documents"] == 2
    assert found["engine"]["tiers"][1]["name"] == "disk"


def printed(stats: pb.Stats) -> str:
    out = io.StringIO()
    show.stats(Console(file=out, soft_wrap=True), stats)
    return out.getvalue()


def test_stats_leave_out_what_is_not_told() -> None:
    stats = pb.Stats()
    stats.engine.tiers.add(name="host", used_bytes=3 << 20)
    assert printed(stats).splitlines()[-2].split(maxsplit=2) == ["tier", "host", "3.0 MiB"]
    assert "quality" not in printed(stats)
    stats.corpus.conditioned, stats.corpus.to_condition = 24, 35
    assert "24 chunks encoded behind neighbours; 35 to be encoded so (again)" in printed(stats)


@pytest.mark.parametrize("tripped", [False, True])
def test_stats_tell_administrators_how_close_auto_is_to_full_prefill(tripped: bool) -> None:
    auto = {"compared": 12, "mean_kl": 0.0123, "upper_kl": None}
    why = {"tripped": tripped, "since": "2026-01-01T00:00:00Z" if tripped else None, "reason": "too high"}
    stats = pb.Stats()
    stats.engine.details.update({"shadow": {"methods": {"auto": auto}, **why}})
    said = "stopped since 2026-01-01T00:00:00Z: too high" if tripped else "not stopped"
    assert f"auto: 12 compared with full prefill, mean KL 0.0123; {said}\n" in printed(stats)


def test_a_report_tells_which_variants_served() -> None:
    chunks = tuple(
        ChunkReport(f"{number}", 8 * number, 8, outcome, tier, variant, 0, "")
        for number, (outcome, tier, variant) in enumerate(
            [("hit", "host", "c0123456789abcdef"), ("hit", "host", "plain"), ("miss", None, None)]
        )
    )
    report = Report("reuse", "", 30, 16, 14, 0, 0.0, 0.0, 0.0, chunks, Timings(), 0.0)
    out = io.StringIO()
    console = Console(file=out, soft_wrap=True)
    show.report(console, report)
    show.details(console, report, 1.0)
    assert out.getvalue().count("chunks: 2 host (1 conditioned), 1 miss") == 2
    assert "\nvariants     conditioned, plain, miss\n" in out.getvalue()


def test_quality_is_reset(run: Run) -> None:
    status, out, _ = run("reset-quality")
    assert (status, out.strip()) == (0, "auto was not stopped")
    assert run.json("reset-quality") == [{"was_stopped": False, "since": "", "reason": ""}]


def test_a_tier_that_is_down_is_shown_beside_the_others(run: Run, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise TierUnavailable("disk: reading the ledger: EIO (Input/output error)")

    run("ingest", "docs")
    for method in ("stats", "tenants"):
        monkeypatch.setattr(DiskTier, method, fails)
    status, out, err = run("stats")
    assert (status, err) == (0, "")
    assert "tier host    2 objects, " in out
    assert "tier disk    down: disk: reading the ledger: EIO (Input/output error)\n" in out
    (found,) = run.json("stats")
    host, disk = found["engine"]["tiers"]
    assert (host["objects"], host["down"]) == (2, "")
    assert "EIO" in disk["down"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["ask", "When?"], 3, "ingest some first [NOT_FOUND]"),
        (["ask", " "], 2, "question"),
        (["ask", "\udcff"], 2, "question"),
        (["ask", "When?", "--method", "psychic"], 2, "plan.method: got 'psychic'"),
        (["ask", "When?", "--method", "query", "--ratio", "3"], 2, "ratio: got 3.0; allowed: a number from 0 to 1"),
        (["ask", "When?", "--variant", "odd"], 2, "plain, conditioned or best"),
        (["ask", "When?", "-k", "0"], 2, "k: got 0"),
        (["ask", "When?", "-k", "99999999999"], 2, "k: got 99999999999"),
        (["stats", "--retries", "-1"], 2, "retries: got -1; allowed: an integer from 0 to 99"),
        (["stats", "--timeout", "0"], 2, "timeout: got 0.0"),
        (["ask", "When?", "--timeout", "-3"], 2, "timeout: got -3.0"),
        (["delete", "nothing"], 3, "no such document: 'nothing'"),
    ],
)
def test_mistakes_have_a_message_and_a_status(run: Run, arguments: list[str], status: int, message: str) -> None:
    got, out, err = run(*arguments)
    assert got == status
    assert message in err
    assert err.startswith("blend-client: ")
    assert out == ""


def test_without_a_server_the_message_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--address", "127.0.0.1:1", "stats"]) == 4
    err = capsys.readouterr().err
    assert "cannot reach a server at 127.0.0.1:1" in err
    assert "start blend-server, or give its --address, or --tls / --ca if it serves TLS" in err


def test_only_so_many_retries_are_made(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(connection, "Client", partial(Client, sleep=pauses.append))
    for given, count in ((["--retries", "2"], 2), (["--retries", "0"], 0), ([], 3)):
        pauses.clear()
        assert main(["--address", "127.0.0.1:1", "stats", *given]) == 4
        assert len(pauses) == count


def test_an_answer_has_the_timeout_as_its_deadline(run: Run, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float | None] = []
    answer = Client.answer

    def watched(client: Client, question: str, *, timeout: float | None = None, **options: Any) -> Any:
        asked.append(timeout)
        return answer(client, question, timeout=timeout, **options)

    monkeypatch.setattr(Client, "answer", watched)
    run("ingest", "docs")
    assert run("ask", "When?", "--max-new-tokens", "1", "--timeout", "30")[0] == 0
    assert run("ask", "When?", "--max-new-tokens", "1")[0] == 0
    assert asked == [30.0, None]


def test_an_answer_that_is_late_is_said_to_be(run: Run, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("ingest", "docs")
    status, _, err = run("ask", "When?", "--timeout", "0.001")
    assert (status, err) == (4, "blend-client: no answer had begun within 0.001 s [DEADLINE_EXCEEDED]\n")

    answer = Client.answer

    def cut_off(*arguments: Any, **options: Any) -> Any:
        for event in answer(*arguments, **options):
            yield replace(event, finish_reason="deadline") if isinstance(event, Answer) else event

    monkeypatch.setattr(Client, "answer", cut_off)
    _, out, _ = run("ask", "When?", "--timeout", "60", "--max-new-tokens", "1")
    assert " […] (cut off at the deadline)\n" in out


def test_an_interrupted_ingestion_says_what_was_stored(run: Run, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ingest = Client.ingest

    def interrupted(*arguments: Any) -> Any:
        for progress in ingest(*arguments):
            yield progress
            if progress.WhichOneof("stage") == "stored":
                raise KeyboardInterrupt

    monkeypatch.setattr(Client, "ingest", interrupted)
    status, _, err = run("ingest", "docs")
    assert (status, err) == (130, "blend-client: interrupted; 1 of 2 documents stored\n")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:0", ":50061"])
def test_an_address_is_a_host_and_a_port(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--address", address]) == 2
    assert f"address: got '{address}'; allowed: host:port with a port from 1" in capsys.readouterr().err


def test_an_authority_is_a_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in ("", "no certificate\n"):
        (tmp_path / "ca.pem").write_text(content)
        assert main(["stats", "--ca", str(tmp_path / "ca.pem")]) == 2
        assert "allowed: a file with certificates in PEM" in capsys.readouterr().err


def test_options_go_before_or_after_the_command(run: Run) -> None:
    assert main(["--address", run.address, "--json", "stats"]) == 0
    assert main(["stats", "--address", run.address, "--json"]) == 0


@pytest.mark.parametrize("command", [[], ["ingest"], ["ask"], ["documents"], ["delete"], ["stats"]])
def test_help_has_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([*command, "--help"])
    assert raised.value.code == 0
    out = capsys.readouterr().out
    assert "example" in out
    assert "blend-client" in out
    assert "--address" in out


def test_text_from_elsewhere_cannot_command_the_terminal() -> None:
    assert safe("a\x1b[31mb\nc\td\x07\u202e") == "a\ufffd[31mb\nc\td\ufffd\ufffd"


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]
    assert [milliseconds(n) for n in (0.4, 312, 1840)] == ["0 ms", "312 ms", "1.84 s"]
    assert ranges([3, 4, 5, 9, 11, 12]) == "3-5, 9, 11-12"


def test_a_bar_on_the_terminal_leaves_the_output_alone(run: Run, docs: Path) -> None:
    """Standard error is a terminal, standard output a pipe: the bar goes to one, JSON to the other."""
    terminal, end = pty.openpty()
    arguments = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; from blend_server.client import main"]
    arguments[2] += "; sys.exit(main())"
    process = subprocess.run(
        [*arguments, "ingest", "docs", "--json", "--address", run.address],
        stdout=subprocess.PIPE,
        stderr=end,
        env={**os.environ, "TERM": "xterm"},
        timeout=60,
    )
    os.close(end)
    shown = b""
    with suppress(OSError):  # what Linux says at the end
        while part := os.read(terminal, 1 << 16):
            shown += part
    os.close(terminal)
    assert process.returncode == 0
    assert [json.loads(line)["stored"]["chunks"] for line in process.stdout.splitlines()] == [1, 1]
    assert b"documents" in shown
    assert b"2/2" in shown
    assert b"stored" not in shown
