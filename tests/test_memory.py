"""What a device has to spare, read from files as Linux writes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from blend.memory import available

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  9 kB\nMemFree:  8 kB\nMemAvailable:   1024000 kB\n")
    return tmp_path / "proc"


def group(directory: Path, limit: str, used: int, active: int = 0, inactive: int = 0) -> None:
    """A group of the second version of control groups."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\nfile 77\ninactive_file {inactive}\nactive_file {active}\n")


def test_without_groups_it_is_what_the_kernel_says(proc: Path, tmp_path: Path) -> None:
    assert available(CPU, proc=proc, cgroups=tmp_path / "none") == 1000 * MIB


def test_a_group_or_one_that_holds_it_may_leave_less(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    (proc / "self" / "cgroup").write_text("0::/outer/inner\n")
    group(groups / "outer" / "inner", "max", 100 * MIB)
    group(groups / "outer", str(300 * MIB), 200 * MIB, active=20 * MIB, inactive=30 * MIB)
    assert available(CPU, proc=proc, cgroups=groups) == 150 * MIB
    group(groups / "outer" / "inner", str(90 * MIB), 100 * MIB)
    assert available(CPU, proc=proc, cgroups=groups) == 0


def test_in_a_container_the_group_of_the_root_counts(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    (proc / "self" / "cgroup").write_text("3:cpu:/some/path\n4:cpuset,memory:/of/the/host\n")
    (groups / "memory").mkdir(parents=True)
    (groups / "memory" / "memory.limit_in_bytes").write_text(f"{400 * MIB}\n")
    (groups / "memory" / "memory.usage_in_bytes").write_text(f"{300 * MIB}\n")
    (groups / "memory" / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {50 * MIB}\n")
    assert available(CPU, proc=proc, cgroups=groups) == 150 * MIB


def test_where_nothing_tells_it_is_not_known(tmp_path: Path) -> None:
    assert available(CPU, proc=tmp_path, cgroups=tmp_path) is None
    assert available(torch.device("meta")) is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_this_machine_has_some() -> None:
    assert (available(CPU) or 0) > 0
