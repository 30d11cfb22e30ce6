"""Rules for every test of the repository: GPU tests, seeds, threads, caches."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch, transformers or matplotlib.
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# OpenMP threads that spin while they wait take the cores from streams, which are threads too; so
# one thread for torch (TS_TEST_THREADS), and sleeping ones in the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

REQUIRE_GPU = os.environ.get("TS_REQUIRE_GPU") == "1"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Without pytest-timeout its ini option is unknown, which would be an error."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds a test may take (needs pytest-timeout)")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(int(os.environ.get("TS_TEST_THREADS", "1")))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if REQUIRE_GPU:
        pytest.fail(
            "TS_REQUIRE_GPU=1 but torch sees no CUDA GPU "
            f"(torch {torch.__version__}, built for CUDA {torch.version.cuda})",
            pytrace=False,
        )
    pytest.skip("needs a CUDA GPU (TS_REQUIRE_GPU=1 makes this a failure)")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Every test starts from the same seeds, whatever ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests never read or write the user's cache folder (unless one is named on purpose)."""
    if "TRAINSTREAM_CACHE_DIR" in os.environ:
        yield Path(os.environ["TRAINSTREAM_CACHE_DIR"])
        return
    folder = tmp_path_factory.mktemp("trainstream-cache")
    os.environ["TRAINSTREAM_CACHE_DIR"] = str(folder)
    yield folder
    del os.environ["TRAINSTREAM_CACHE_DIR"]
