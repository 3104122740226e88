"""A data directory has one server at a time, which a second one is told."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from blend.errors import InvalidConfig
from blend_server import lock
from blend_server.__main__ import main
from blend_server.client import Client
from blend_server.server import BlendServer

HOLD = "import sys, time, pathlib; from blend_server import lock\nwith lock.held(pathlib.Path(sys.argv[1])):\n"
HOLD += "    print('held', flush=True); time.sleep(600)"


def test_a_directory_is_held_until_it_is_let_go(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "data"
    with lock.held(directory):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / "lock").stat().st_mode) == 0o600
        with pytest.raises(InvalidConfig, match=rf"process {os.getpid()}\b") as raised, lock.held(directory):
            pass
        assert raised.value.field == "data_dir"
        assert str(directory) in str(raised.value)
    with lock.held(directory):
        pass


def test_a_server_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(InvalidConfig, match=f"process {process.pid},"), lock.held(tmp_path):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with lock.held(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("kind", ["a file", "below a file", "a link in place of the lock", "a directory in its place"])
def test_what_cannot_be_held_is_a_wrong_setting(tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "data"
    if "file" in kind:
        directory.write_text("mine")
        directory = directory / "data" if kind.startswith("below") else directory
    else:
        directory.mkdir()
        if "link" in kind:
            (tmp_path / "outside").write_text("mine")
            (directory / "lock").symlink_to(tmp_path / "outside")
        else:
            (directory / "lock").mkdir()
    with pytest.raises(InvalidConfig, match="can be made and written") as raised, lock.held(directory):
        pass
    assert str(directory) in str(raised.value)
    for file in (tmp_path / "data", tmp_path / "outside"):
        assert not file.is_file() or file.read_text() == "mine"


def test_a_second_server_is_refused_and_the_first_goes_on(
    start: Callable[..., BlendServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start()
    data = tmp_path / "data"
    assert main(["--address", "127.0.0.1:0", "--data-dir", str(data), "--model", "nothing is loaded"]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(rf"blend-server: --data-dir: got '{data}'; allowed: .*process {os.getpid()}, .*\n", said)
    with Client(server.address) as client:
        assert client.stats().corpus.documents == 0
    server.stop()
    start()


def test_a_server_that_cannot_start_lets_go(start: Callable[..., BlendServer], tiny_server: BlendServer) -> None:
    with pytest.raises(InvalidConfig, match="free port"):
        start(address=tiny_server.address)
    start()
