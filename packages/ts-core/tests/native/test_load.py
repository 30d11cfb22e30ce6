"""Loading the native core: lazily, rebuilt when stale, and in words when it is broken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ts_core import _build, _native

Run = Callable[..., "subprocess.CompletedProcess[str]"]
PACKAGE = Path(_native.__file__).resolve().parent
checkout = pytest.mark.skipif(
    not _native.is_source_checkout(), reason="an installed wheel has no sources to build"
)
USE = "from ts_core import _native; print(_native.simd_level())"


def copy_package(target: Path, *, csrc: bool, binary: bytes | None) -> Path:
    """A copy of ts_core under `target`; `binary` replaces the built module (b"" leaves it out)."""
    ignore = ["_host.*", "__pycache__", *([] if csrc else ["csrc"])]
    package = target / "ts_core"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns(*ignore))
    extension = _build.extension_path(package)
    if binary is None:
        shutil.copy2(_native.extension_path(), extension)
    elif binary:
        extension.write_bytes(binary)
    return package


@pytest.fixture(autouse=True)
def _built() -> None:
    _native.load()


def test_importing_loads_neither_the_core_nor_torch(run_python: Run) -> None:
    code = """
import sys
import ts_core, ts_core._native, ts_core._build
assert "ts_core._host" not in sys.modules and "torch" not in sys.modules
assert ts_core._native.simd_level() and "ts_core._host" in sys.modules
assert "torch" not in sys.modules and "pybind11" not in sys.modules
"""
    run_python(code)


@checkout
def test_the_loaded_module_is_the_one_built_from_these_sources() -> None:
    assert _native.is_source_checkout()
    assert (
        _native.csrc_hash() == _build.source_hash() == _build.built_hash(_native.extension_path())
    )
    assert Path(_native.load().__file__ or "") == _native.extension_path()
    assert sys.modules["ts_core._host"] is _native.load()


def test_an_installed_copy_needs_no_sources_and_no_tools(run_python: Run, tmp_path: Path) -> None:
    copy_package(tmp_path, csrc=False, binary=None)
    done = run_python(USE, PYTHONPATH=str(tmp_path), PATH="/nowhere")
    assert done.stdout.split() == [_native.simd_level()]


@pytest.mark.parametrize(
    ("csrc", "binary", "words"),
    [
        (False, b"not a library", ["cannot be loaded", "pip install --force-reinstall"]),
        (False, b"", ["is not in", "found: none", "pip install --force-reinstall"]),
        pytest.param(True, b"no library", ["missing: ", "apt-get install g++"], marks=checkout),
        pytest.param(True, b"", ["missing: ", "C++17 compiler"], marks=checkout),
    ],
    ids=["corrupt", "absent", "corrupt-no-compiler", "absent-no-compiler"],
)
def test_a_broken_core_is_an_error_with_the_line_that_fixes_it(
    run_python: Run, tmp_path: Path, csrc: bool, binary: bytes, words: list[str]
) -> None:
    package = copy_package(tmp_path, csrc=csrc, binary=binary)
    code = "import ts_core\nfrom ts_core import _native\n_native.simd_level()"
    done = run_python(code, status=1, PYTHONPATH=str(tmp_path), PATH="/nowhere", CXX=None)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ts_core.errors.NativeCoreError: ")
    for word in words:
        assert word in last
    assert str(package) in last or csrc


def test_a_module_for_another_python_is_named(run_python: Run, tmp_path: Path) -> None:
    package = copy_package(tmp_path, csrc=False, binary=b"")
    (package / "_host.cpython-39-x86_64-linux-gnu.so").write_bytes(b"x")
    done = run_python(USE, status=1, PYTHONPATH=str(tmp_path))
    assert "found: _host.cpython-39-x86_64-linux-gnu.so" in done.stderr


@checkout
def test_a_stale_module_that_cannot_be_rebuilt_is_not_used(run_python: Run, tmp_path: Path) -> None:
    package = copy_package(tmp_path, csrc=True, binary=None)
    assert run_python(USE, PYTHONPATH=str(tmp_path), PATH="/nowhere").returncode == 0
    with open(package / "csrc/version.cpp", "a") as file:
        file.write("// changed\n")
    done = run_python(USE, status=1, PYTHONPATH=str(tmp_path), PATH="/nowhere", CXX=None)
    assert "NativeCoreError" in done.stderr and "apt-get install g++" in done.stderr


ONLY_VERSION = """
import re, sys
from ts_core import _build, _native
whole_file = _build.ninja_file
def ninja_file(*arguments):
    # Compiling everything takes a minute: only version.cpp is, the rest is there already.
    text = whole_file(*arguments)
    text = re.sub(r"(?m)^build (?!version)\\w+\\.o: .*\\n(  more = .*\\n)?", "", text)
    return re.sub(r"(?<= )(?!version)(\\w+\\.o)(?= |$)", sys.argv[1] + r"/\\1", text, flags=re.M)
_build.ninja_file = ninja_file
assert not _build.is_current(_native.extension_path())
print(_native.simd_level())
assert _native.csrc_hash() == _build.source_hash()
"""


@checkout
def test_a_changed_source_is_built_on_first_use(run_python: Run, tmp_path: Path) -> None:
    project = tmp_path / "project"
    package = copy_package(project / "src", csrc=True, binary=None)
    (project / "pyproject.toml").write_text("")
    with open(package / "csrc/version.cpp", "a") as file:
        file.write("// changed\n")
    objects = _build.default_work_dir(_build.CSRC_DIR)
    done = run_python(ONLY_VERSION, str(objects), PYTHONPATH=str(project / "src"))
    assert done.stdout.split() == [_native.simd_level()]
    built = list(_build.default_work_dir(package / "csrc").glob("*.o"))
    assert [path.name for path in built] == ["version.o"]


@checkout
def test_building_as_a_module_prints_the_path(run_python: Run) -> None:
    code = (
        "import runpy, sys; sys.argv = ['_build']; "
        "runpy.run_module('ts_core._build', run_name='__main__')"
    )
    done = run_python(code)
    assert done.stdout.strip() == str(_native.extension_path())
    code = code.replace("['_build']", "['_build', '--wrong']")
    assert "unknown argument '--wrong'" in run_python(code, status=2).stderr
