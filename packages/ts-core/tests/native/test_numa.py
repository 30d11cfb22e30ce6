"""Chunks run near their memory where there are several nodes; the result never depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ts_core import _native

N = 1_000_003
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}
HOST = _native.load()


@pytest.fixture
def pretend() -> Iterator[object]:
    yield HOST.pretend_nodes
    HOST.pretend_nodes(0)


def update(threads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    param, grad = torch.randn(2, N, generator=generator)
    moments = torch.zeros(2, N)
    _native.adamw_step(
        param.data_ptr(),
        "float32",
        grad.data_ptr(),
        "float32",
        moments[0].data_ptr(),
        moments[1].data_ptr(),
        0,
        N,
        step=1,
        threads=threads,
        **HYPER,
    )
    return [param, moments]


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_every_chunk_runs_once_whatever_the_nodes(many_cores: None, pretend, nodes: int) -> None:
    plain = update(8)
    pretend(nodes)
    placed = update(8)
    near, far = HOST.pretended_places()
    chunk = 31_744  # a quarter of a thread's share, in whole stages of 1024
    assert near >= 1
    assert near + far == -(-N // chunk)
    assert all(torch.equal(a, b) for a, b in zip(plain, placed, strict=True))


def test_one_thread_or_one_node_takes_the_plain_way(many_cores: None, pretend) -> None:
    pretend(2)
    update(1)
    assert HOST.pretended_places() == (0, 0)
    pretend(1)
    update(8)
    assert HOST.pretended_places() == (0, 0)


def test_the_system_tells_where_a_page_is() -> None:
    nodes = HOST.memory_nodes()
    listed = Path("/sys/devices/system/node/has_memory")
    assert nodes >= 1
    if not listed.exists():
        assert nodes == 1
        return
    assert nodes == 1 + int(listed.read_text().strip().replace("-", ",").split(",")[-1])
    tensor = torch.ones(1 << 16)
    assert -1 <= HOST.page_node(tensor.data_ptr() + 4) < nodes  # -1: the sandbox does not tell
    assert 0 <= HOST.current_node() < max(nodes, 64)
