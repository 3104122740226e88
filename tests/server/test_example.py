"""The example client, with stubs made as it says, against a real server."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from blend_server.client import Client
from blend_server.server import BlendServer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "grpc_client.py"


def test_a_client_made_from_the_proto_file_alone(client: Client, tiny_server: BlendServer, tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools")
    text = EXAMPLE.read_text("utf-8")
    assert not re.search(r"^\s*(import|from) (blend|blend_server)\b", text, re.MULTILINE)
    (command,) = (line for line in text.splitlines() if "grpc_tools.protoc" in line)
    arguments = [a.replace("_out=.", f"_out={tmp_path}") for a in shlex.split(command)[1:]]
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)

    (tmp_path / "light.md").write_text("The lighthouse was built in 1888.\n")
    ask = [sys.executable, str(EXAMPLE), tiny_server.address, "light.md"]
    where = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(tmp_path)}, "timeout": 120}
    done = subprocess.run([*ask, "When was it built?"], capture_output=True, text=True, check=False, **where)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1].split(";")[1].split(":")[0]) == ("light.md: chunked", " query")
    assert "light.md: stored" in lines and "from: light.md #0" in lines
    assert re.fullmatch(r"\d+ ms to the first token; query: \d+ of \d+ tokens from storage, .*% recomputed", lines[-1])
    assert [d.id for d in client.documents()] == ["light.md"]

    refused = subprocess.run([*ask, ""], capture_output=True, text=True, check=False, **where)  # type: ignore[call-overload]
    assert refused.returncode == 1
    assert "INVALID_ARGUMENT: question: got ''; allowed: a question that is not empty" in refused.stderr
