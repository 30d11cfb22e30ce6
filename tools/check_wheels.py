"""Check what lies in built wheels and sdists.

    python tools/check_wheels.py dist

Every distribution of the repository must be there once as a wheel and once as an sdist. Prints
one line per file and every fault; the exit status is 1 if there is any. Needs only the standard
library (Python >= 3.11).
"""

from __future__ import annotations

import configparser
import email
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NATIVE = "ts-core"  # the only distribution with compiled code
BINARY = (".so", ".pyd", ".dylib", ".dll", ".o", ".obj", ".a", ".lib")


def projects() -> dict[str, dict[str, Any]]:
    """The [project] table of every pyproject.toml, by distribution name."""
    files = [ROOT / "pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]
    tables = [tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in files]
    return {table["name"]: table for table in tables}


def check_wheel(path: Path, project: dict[str, Any]) -> list[str]:
    """The faults of one wheel; an empty list if there is none."""
    faults = []
    name, version = project["name"], project["version"]
    module = name.replace("-", "_")
    _, _, tag = path.stem.split("-", 2)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        info = f"{module}-{version}.dist-info"
        read = {entry: archive.read(f"{info}/{entry}").decode() for entry in ("METADATA", "WHEEL")}
        points = ""
        if f"{info}/entry_points.txt" in names:
            points = archive.read(f"{info}/entry_points.txt").decode()
    metadata, wheel = email.message_from_string(read["METADATA"]), read["WHEEL"]
    if (metadata["Name"], metadata["Version"]) != (name, version):
        faults.append(f"metadata names {metadata['Name']} {metadata['Version']}")
    if metadata["License-Expression"] != "Apache-2.0":
        faults.append(f"License-Expression is {metadata['License-Expression']!r}")
    wanted = [f"{module}/__init__.py", f"{module}/py.typed", f"{info}/licenses/LICENSE"]
    faults += [f"{entry} is missing" for entry in wanted if entry not in names]
    allowed = (f"{module}/", f"{info}/")
    faults += [f"stray file {entry}" for entry in names if not entry.startswith(allowed)]
    faults += [f"stray file {entry}" for entry in names if "__pycache__" in entry]
    faults += _check_entry_points(points, project)
    binaries = [entry for entry in names if entry.endswith(BINARY)]
    if name == NATIVE:
        if len(binaries) != 1 or not Path(binaries[0]).name.startswith("_host."):
            faults.append(f"expected the one module _host, found {binaries}")
        if tag.endswith("any") or not tag.startswith("cp"):
            faults.append(f"tag {tag} is for any platform, but the wheel holds compiled code")
        if "Root-Is-Purelib: false" not in wheel:
            faults.append("marked as pure Python, but it holds compiled code")
    else:
        faults += [f"compiled file {entry}" for entry in binaries]
        if tag != "py3-none-any":
            faults.append(f"tag is {tag}, expected py3-none-any")
    return faults


def _check_entry_points(text: str, project: dict[str, Any]) -> list[str]:
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keep case
    parser.read_string(text)
    found = {group: dict(parser[group]) for group in parser.sections()}
    wanted = {group: dict(entries) for group, entries in project.get("entry-points", {}).items()}
    if project.get("scripts"):
        wanted["console_scripts"] = dict(project["scripts"])
    return [] if found == wanted else [f"entry points are {found}, expected {wanted}"]


def check_sdist(path: Path, project: dict[str, Any]) -> list[str]:
    """The faults of one sdist; an empty list if there is none."""
    with tarfile.open(path) as archive:
        names = [member.name.partition("/")[2] for member in archive.getmembers()]
    module = project["name"].replace("-", "_")
    wanted = ["pyproject.toml", "LICENSE", "README.md", f"src/{module}/__init__.py"]
    if project["name"] == NATIVE:
        wanted.append("hatch_build.py")
        if not any(name.endswith(".cpp") for name in names):
            wanted.append("the C++ source (*.cpp)")
    faults = [f"{entry} is missing" for entry in wanted if entry not in names]
    faults += [f"compiled file {entry}" for entry in names if entry.endswith(BINARY)]
    if not any(entry.startswith("tests/") and entry.endswith(".py") for entry in names):
        faults.append("holds no tests")
    return faults


def check(folder: Path) -> list[str]:
    """All faults of a folder that should hold every distribution."""
    faults = []
    for name, project in projects().items():
        stem = f"{name.replace('-', '_')}-{project['version']}"
        wheels, sdists = sorted(folder.glob(f"{stem}-*.whl")), sorted(folder.glob(f"{stem}.tar.gz"))
        if len(wheels) != 1 or len(sdists) != 1:
            faults.append(f"{name}: {len(wheels)} wheels and {len(sdists)} sdists, expected 1 each")
        for path, inspect in [(p, check_wheel) for p in wheels] + [
            (p, check_sdist) for p in sdists
        ]:
            found = inspect(path, project)
            print(f"{path.name} ({path.stat().st_size / 1024:.0f} KiB): {len(found)} faults")
            faults += [f"{path.name}: {fault}" for fault in found]
    return faults


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    problems = check(Path(sys.argv[1]))
    print(*problems, sep="\n")
    sys.exit(1 if problems else 0)
