"""The wheel and the sdist, really built from this checkout by hatchling's hook."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ts_core import _build, _native

pytest.importorskip("hatchling", reason="needs hatchling to build a wheel")
if not _native.is_source_checkout():
    pytest.skip("an installed wheel has no project to build", allow_module_level=True)

PROJECT = Path(__file__).resolve().parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def build(target: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True, timeout=300)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _native.load()  # the objects of this build are used again
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_built_module_and_no_sources(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    extension = _build.extension_path().name
    assert [name for name in names if "_host" in name] == [f"ts_core/{extension}"]
    assert not [name for name in names if "csrc" in name or name.endswith((".cpp", ".h", ".o"))]
    assert "ts_core/_native.py" in names and "ts_core/py.typed" in names


def test_the_wheel_is_tagged_for_this_python_and_platform(wheel: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.startswith(f"ts_core-0.8.0-{tag}-{tag}-")
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("ts_core-0.8.0.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: false" in text
    assert f"Tag: {wheel.stem.split('-', 2)[2]}" in text


def test_the_wheel_works_without_sources_and_tools(
    wheel: Path, tmp_path: Path, run_python: Run
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
import sys, ts_core
assert ts_core.__file__.startswith(sys.argv[1]), ts_core.__file__
from ts_core import _native
assert not _native.is_source_checkout()
print(_native.csrc_hash(), _native.grad_stats(0, "float32", 0))
"""
    done = run_python(code, str(tmp_path), PYTHONPATH=str(tmp_path), PATH="/nowhere", CXX=None)
    assert done.stdout.split(" ", 1) == [_build.source_hash(), "(0.0, 0)\n"]


def test_the_module_depends_on_no_cuda_and_no_torch(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        module = archive.extract(f"ts_core/{_build.extension_path().name}", tmp_path)
    listed = subprocess.run(["readelf", "-d", module], capture_output=True, text=True, check=True)
    needed = [
        line.split("[")[1].rstrip("]") for line in listed.stdout.splitlines() if "NEEDED" in line
    ]
    assert "libstdc++.so.6" in needed  # dynamic, so that exceptions cross into torch's
    assert not [name for name in needed if "cuda" in name or "torch" in name or "python" in name]


def test_the_sdist_holds_sources_and_no_binary(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    expected = {f"src/ts_core/csrc/{path.name}" for path in _build.sources()}
    assert expected | {"hatch_build.py", "src/ts_core/_build.py", "pyproject.toml"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyd", ".dylib", ".o"))]
    assert not [name for name in names if name.startswith("build/")]


def test_an_editable_install_has_the_module_beside_the_source(tmp_path: Path) -> None:
    with zipfile.ZipFile(build("wheel:editable", tmp_path)) as archive:
        names = archive.namelist()
        (path_file,) = [name for name in names if name.endswith(".pth")]
        assert archive.read(path_file).decode().strip() == str(PROJECT / "src")
    assert not [name for name in names if "_host" in name]
    assert _build.is_current(_build.extension_path())
