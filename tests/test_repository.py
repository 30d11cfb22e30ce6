"""Rules that hold for the whole repository: no unpickling, metadata, licences, docs."""

from __future__ import annotations

import ast
import contextlib
import re
import runpy
import sys
import warnings
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["ts-core", "ts-quant", "ts-kernels", "ts-hf", "ts-bench"]
FOLDERS = [ROOT, *(ROOT / "packages" / name for name in PACKAGES)]
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def _project(folder: Path) -> dict[str, Any]:
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def _sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (folder / "src").rglob("*.py"))


def unpickling(source: str) -> list[str]:
    """Places in Python source that may unpickle a file."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
            faults += [f"line {node.lineno}: import {n}" for n in names if n in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] in UNPICKLERS:
                faults.append(f"line {node.lineno}: from {node.module} import")
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            loads_torch = called in {"torch.load", "load"} and "torch" in source
            if called == "torch.load" or (loads_torch and "from torch import load" in source):
                if keywords.get("weights_only") != "True":
                    faults.append(f"line {node.lineno}: torch.load without weights_only=True")
            if keywords.get("allow_pickle", "False") != "False":
                faults.append(f"line {node.lineno}: allow_pickle")
    return faults


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
    ],
)
def test_the_scan_sees_unpickling(source: str) -> None:
    assert unpickling(source)


def test_the_scan_accepts_safe_loading() -> None:
    assert not unpickling("import torch, json\ntorch.load('x', weights_only=True)\njson.load(f)")


def test_nothing_unpickles() -> None:
    sources = _sources()
    assert len(sources) > 20
    faults = {
        str(path.relative_to(ROOT)): unpickling(path.read_text(encoding="utf-8"))
        for path in sources
    }
    assert not {path: found for path, found in faults.items() if found}


def test_source_runs_on_the_oldest_python() -> None:
    """No module of Python 3.11 or later is imported, and the syntax is 3.10's."""
    for path in _sources():
        tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert "tomllib" not in [alias.name for alias in node.names], path
            assert not isinstance(node, getattr(ast, "TryStar", ())), path


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_metadata(folder: Path) -> None:
    project = _project(folder)
    module = project["name"].replace("-", "_")
    assert project["version"] == "0.8.0"
    assert project["requires-python"] == ">=3.10"
    assert project["license"] == "Apache-2.0"
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (folder / "src" / module / "py.typed").exists()
    assert (folder / project["readme"]).exists()
    if folder != ROOT:
        changes = (folder / "CHANGELOG.md").read_text(encoding="utf-8")
        assert re.search(r"^## 0\.8\.0\b", changes, re.MULTILINE)


def test_siblings_are_required_in_ranges_that_no_namesake_satisfies() -> None:
    """The public index has another `ts-quant`, and another author's `trainstream` up to 0.7."""
    ours = {_project(folder)["name"] for folder in FOLDERS}
    seen = 0
    for folder in FOLDERS:
        project = _project(folder)
        extras = project.get("optional-dependencies", {}).values()
        for text in [*project["dependencies"], *(line for extra in extras for line in extra)]:
            requirement = Requirement(text)
            if requirement.name not in ours:
                continue
            seen += 1
            for namesake in ("0.1", "0.4.1", "0.7", "0.7.99", "0.9", "1.0", "2026.1"):
                assert not requirement.specifier.contains(namesake), f"{text} in {folder}"
            assert requirement.specifier.contains("0.8.0")
    assert seen >= 8


def test_root_requires_every_package() -> None:
    needed = {Requirement(text).name for text in _project(ROOT)["dependencies"]}
    assert needed == set(PACKAGES)


def test_entry_points_name_things_that_exist() -> None:
    import importlib

    from ts_core.registry import GROUPS, Registry

    for folder in FOLDERS:
        for group, entries in _project(folder).get("entry-points", {}).items():
            assert group in GROUPS
            for name, value in entries.items():
                module, _, attribute = value.partition(":")
                expected = getattr(importlib.import_module(module), attribute)
                assert Registry(group).get(name) is expected


def test_ci_runs_the_readmes_test_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python3 -m venv .*nox -s tests$", readme, re.MULTILINE)
    assert len(commands) == 1
    assert commands[0] in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_constraints_pin_everything_exactly() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][^+\s]*", line) for line in lines)
    names = [line.partition("==")[0].lower().replace("_", "-") for line in lines]
    assert len(names) == len(set(names))
    assert {"torch", "triton", "transformers", "peft", "nox", "ruff", "mypy"} <= set(names)


def test_the_pages_name_a_python_that_every_pinned_version_runs_on() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    needs = {}
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE):
        with contextlib.suppress(PackageNotFoundError):
            found = distribution(name)
            if found.version == version and found.metadata["Requires-Python"]:
                needs[name] = SpecifierSet(found.metadata["Requires-Python"])
    if len(needs) < 20:
        pytest.skip("the pinned versions are not installed here")
    for page, pattern in (
        ("README.md", r"set-up \(Python ≥ (3\.\d+)"),
        (".ci/run", r">= (3\.\d+)"),
    ):
        match = re.search(pattern, (ROOT / page).read_text(encoding="utf-8"))
        assert match, page
        refusing = [name for name, needed in needs.items() if f"{match[1]}.0" not in needed]
        assert not refusing, f"{page} says Python {match[1]}, which is too old for {refusing}"


def test_only_the_warning_of_torchs_own_import_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # runpy warns of a module that is imported already, as it is after some other tests.
    monkeypatch.delitem(sys.modules, "torch.utils.mkldnn", raising=False)
    runpy.run_module("torch.utils.mkldnn", run_name="imported_again")  # inductor imports it
    text = "`torch.jit.script_method` is deprecated."
    with pytest.raises(DeprecationWarning, match="script_method"):
        warnings.warn_explicit(text, DeprecationWarning, __file__, 1, module="ts_core.engine")
