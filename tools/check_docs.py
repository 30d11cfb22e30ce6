"""Check the pages: links lead somewhere, and marked Python examples run.

    python tools/check_docs.py [PAGE ...]

Without arguments, every Markdown page of the repository. A relative link must name a file that
exists and, after `#`, one of its headings. A Python block whose fence is preceded by the line
`<!-- tested -->` is run; the blocks of one page run in one process, in order, in an empty folder.
The examples of a page with a `tests/test_readme.py` beside it are left to that test.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)(`{3,})(.*)$")
MARK = "<!-- tested -->"
LIMIT_S = 120


def pages() -> list[Path]:
    """Every Markdown page of the repository."""
    patterns = ["*.md", "docs/**/*.md", "packages/*/*.md", "packages/*/docs/**/*.md"]
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


def split(text: str) -> tuple[str, list[tuple[int, str]]]:
    """The text outside fenced blocks, and (line number, code) of each block marked as tested."""
    prose: list[str] = []
    blocks: list[tuple[int, str]] = []
    code: list[str] = []
    fence, previous, start, tested = "", "", 0, False
    for number, line in enumerate(text.splitlines(), 1):
        found = FENCE.match(line)
        if found and not fence:
            fence, code, start = found.group(2), [], number
            tested = previous.strip() == MARK and found.group(3).strip().startswith("python")
        elif found and found.group(2) == fence and not found.group(3).strip():
            if tested:
                blocks.append((start, "\n".join(code)))
            fence = ""
        elif fence:
            code.append(line)
        else:
            prose.append(line)
        if line.strip():
            previous = line
    return "\n".join(prose), blocks


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    prose, _ = split(text)
    found = set()
    for line in prose.splitlines():
        heading = re.match(r"#{1,6} +(.*)", line)
        if heading:
            words = re.sub(r"[^\w\- ]", "", heading.group(1).strip().lower())
            found.add(words.replace(" ", "-"))
    return found


def check_links(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    prose, _ = split(page.read_text(encoding="utf-8"))
    prose = re.sub(r"`[^`\n]*`", "", prose)
    faults = []
    for match in LINK.finditer(prose):
        link = match.group(1) or match.group(2)
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            faults.append(f"{page.relative_to(ROOT)}: {link} does not exist")
        elif anchor and target.suffix == ".md":
            if anchor not in anchors(target.read_text(encoding="utf-8")):
                faults.append(f"{page.relative_to(ROOT)}: {link} names no heading")
    return faults


def run_examples(page: Path) -> tuple[int, list[str]]:
    """Run a page's tested blocks; returns how many there are, and the fault if one failed."""
    _, blocks = split(page.read_text(encoding="utf-8"))
    if not blocks or (page.parent / "tests" / "test_readme.py").exists():
        return 0, []
    # Blank lines in front keep the page's line numbers in tracebacks.
    program = ""
    for start, code in blocks:
        program += "\n" * (start - program.count("\n")) + code + "\n"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"{page.stem}_examples.py"
        script.write_text(program, encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, "-W", "error::DeprecationWarning:__main__", str(script)],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return len(blocks), [f"{page.relative_to(ROOT)}: examples took over {LIMIT_S} s"]
    if done.returncode:
        return len(blocks), [f"{page.relative_to(ROOT)}: an example failed\n{done.stderr}"]
    return len(blocks), []


def main(arguments: list[str]) -> int:
    """Check the named pages, or all; returns the exit status."""
    chosen = [Path(argument).resolve() for argument in arguments] or pages()
    faults: list[str] = []
    examples = 0
    for page in chosen:
        faults += check_links(page)
        count, failed = run_examples(page)
        examples += count
        faults += failed
    print(*faults, sep="\n")
    print(f"{len(chosen)} pages, {examples} tested examples, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
