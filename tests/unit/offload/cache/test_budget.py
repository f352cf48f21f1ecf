"""Experts never get more memory than is free, under any limit."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from swarm_plugins.errors import CapacityError
from swarm_plugins.offload.cache import budget
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.disk.buffers import BufferPool, host_buffer

GB = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the machine has free, without any other limit."""

    def set_free(num_bytes: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=num_bytes))
        monkeypatch.setattr(budget, "_process_limits", lambda: ())
        monkeypatch.setattr(budget, "_group_limits", lambda: ())

    return set_free


def test_without_a_wish_it_is_what_is_free_less_a_reserve(free: Any) -> None:
    free(10 * GB)
    chosen = budget.choose_fast_bytes(OffloadConfig(), {0: GB}, {0: 100}, CPU)
    assert 8 * GB <= chosen < 9 * GB


def test_it_is_never_more_than_all_experts(free: Any) -> None:
    free(100 * GB)
    assert budget.choose_fast_bytes(OffloadConfig(), {0: 10, 1: 20}, {0: 4, 1: 2}, CPU) == 80


def test_a_machine_that_is_full_says_so(free: Any) -> None:
    free(GB // 2)
    with pytest.raises(CapacityError, match=rf"{GB // 2} bytes are free, and 0 can be used .* at least {3 * GB}"):
        budget.choose_fast_bytes(OffloadConfig(), {0: GB}, {0: 100}, CPU)


def test_the_least_is_an_expert_for_each_reader_and_one_or_all() -> None:
    assert budget.least_bytes({0: 10, 1: 30}, {0: 8, 1: 8}, 4) == 150
    assert budget.least_bytes({0: 10}, {0: 2}, 4) == 20


def test_pinned_ram_is_half_of_what_is_free_or_what_is_said(free: Any) -> None:
    free(10 * GB)
    assert 4 * GB <= budget.choose_ram_bytes(OffloadConfig(), {0: GB}, {0: 100}) < 5 * GB
    assert budget.choose_ram_bytes(OffloadConfig(ram_bytes=7), {0: GB}, {0: 100}) == 7
    assert budget.choose_ram_bytes(OffloadConfig(ram_bytes=0), {0: GB}, {0: 100}) == 0


def test_limits_of_the_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    used = psutil.Process().memory_info().vms
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (used + 64 * GB // 1024, -1) if kind == resource.RLIMIT_AS else (-1, -1)
    )
    assert 0 <= budget.free_host_bytes() <= 64 * GB // 1024


def write_group(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name.replace("__", ".")).write_text(f"{value}\n")


def test_limits_of_enclosing_control_groups_count(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/outer/inner\n")
    write_group(root, memory__stat="")
    write_group(root / "outer", memory__max=1000, memory__current=900, memory__stat="anon 5\ninactive_file 250")
    write_group(root / "outer/inner", memory__max="max", memory__current=800)
    assert list(budget._group_limits(root, membership)) == [350]


def test_limits_of_the_old_kind_of_control_groups_count(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("4:memory:/mine\n3:cpuset:/\n0::/\n")
    write_group(root / "memory", memory__limit_in_bytes=9000, memory__usage_in_bytes=1000)
    write_group(root / "memory/mine", memory__limit_in_bytes=500, memory__usage_in_bytes=100)
    assert list(budget._group_limits(root, membership)) == [400, 8000]


def test_systems_without_control_groups_have_no_such_limit(tmp_path: Path) -> None:
    assert list(budget._group_limits(tmp_path, tmp_path / "none")) == []


def test_a_pool_reuses_and_never_exceeds_its_limit() -> None:
    pool = BufferPool(100, host_buffer, "fast_bytes")
    first = pool.take(60)
    with pytest.raises(CapacityError, match=r"60 bytes does not fit: 60 of 100 bytes \(fast_bytes\) are in use"):
        pool.take(60)
    pool.give(first)
    assert pool.take(60) is first


def test_free_buffers_of_another_size_make_room() -> None:
    pool = BufferPool(100, host_buffer, "fast_bytes")
    for buffer in [pool.take(50), pool.take(50)]:
        pool.give(buffer)
    assert pool.take(80).numel() == 80
    assert pool.allocated_bytes == 80


def test_a_system_without_memory_is_a_typed_error() -> None:
    def fail(num_bytes: int) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    with pytest.raises(CapacityError, match=r"no memory for another expert of 5 bytes.*lower ram_bytes"):
        BufferPool(100, fail, "ram_bytes").take(5)


@pytest.mark.parametrize("num_bytes", [1, 100, 1 << 16, (1 << 22) + 12345])
def test_buffers_have_their_size_and_alignment(num_bytes: int) -> None:
    buffer = host_buffer(num_bytes)
    assert buffer.numel() == num_bytes
    assert buffer.data_ptr() % 64 == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not wipe memory of a forked process")
def test_a_forked_process_keeps_no_experts() -> None:
    buffer = host_buffer(1 << 20).fill_(1)
    pid = os.fork()
    if not pid:
        os._exit(int(buffer.numpy().any()))
    assert os.waitpid(pid, 0)[1] == 0
    assert buffer.numpy().all()
