"""Make a checkout importable, entry points included, without any build back end.

    python tools/link_checkout.py DIR      # then: PYTHONPATH=DIR python ...

An editable install needs hatchling and a package index; a bare machine with only torch on it has
neither. This writes, for each package of the repository, the `*.dist-info` that
`importlib.metadata` reads (name, version, entry points) and a symbolic link to its import
package. It needs nothing outside the standard library (Python >= 3.11).
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def link(target: Path) -> list[str]:
    """Write links and metadata for every package of the checkout into `target`."""
    target.mkdir(parents=True, exist_ok=True)
    linked = []
    for pyproject in [ROOT / "pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]:
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        name, version = project["name"], project["version"]
        module = name.replace("-", "_")
        info = target / f"{module}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
        )
        (info / "INSTALLER").write_text("link_checkout\n", encoding="utf-8")
        lines = []
        for group, entries in project.get("entry-points", {}).items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
        if project.get("scripts"):
            lines += ["[console_scripts]"]
            lines += [f"{key} = {value}" for key, value in project["scripts"].items()]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        link_path = target / module
        if link_path.is_symlink():
            link_path.unlink()
        link_path.symlink_to(pyproject.parent / "src" / module, target_is_directory=True)
        linked.append(f"{name} {version}")
    return linked


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print("linked:", ", ".join(link(Path(sys.argv[1]))))
