"""Files, folders and the standard library into documents, with a share held out."""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ts_core.errors import DataError
from ts_hf.cli.folder import is_run_folder
from ts_hf.cli.problems import Problems, RecordError
from ts_hf.cli.records import Record, Text, parse_line

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".text")
_STDLIB_SKIPPED = {
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"),
    *("encodings", "pydoc_data"),  # tables and one long text, not programs
}
_LEAST_DOCUMENTS = 2  # this many times 1 / share, to hold out whole documents


@dataclass(frozen=True)
class Document:
    """A piece of data.

    Attributes:
        name: decides its place in the order, and whether it is held out; the same everywhere.
        record: what it holds.
        place: where it stands, for messages.
        number: its place among all that was read.
    """

    name: str
    record: Record
    place: str
    number: int = 0


def check_sources(sources: Sequence[str]) -> None:
    """Refuse sources that are not there; reads nothing.

    Raises:
        DataError: naming all of them.
    """
    missing = [
        source
        for source in sources
        if source != "stdlib" and not Path(source).expanduser().exists()
    ]
    if missing:
        listed = ", ".join(repr(source) for source in missing)
        raise DataError(f"data: there is no file or folder {listed}. Give paths, or 'stdlib'.")


def overlaps(sources: Sequence[str], held_out: str | None = None) -> list[str]:
    """Remarks, in words, about files that are given more than once; reads none of them."""
    given = [file for source in sources for file in _real_files(source)]
    times = Counter(given)
    found = []
    again = [file for file, count in times.items() if count > 1]
    if again:
        found.append(
            f"{_some(again)} given more than once, and learned from as often. Leave the repeats "
            f"out if this is not meant"
        )
    both = [file for file in dict.fromkeys(_real_files(held_out or "")) if file in times]
    if both:
        found.append(
            f"{_some(both)} both trained on and held out: the held-out loss will not show how the "
            f"model does on what it has not seen"
        )
    return found


def _some(files: Sequence[Path]) -> str:
    more = len(files) - 1
    return f"{files[0]} is" if not more else f"{files[0]} and {more} more are"


def _real_files(source: str) -> list[Path]:
    if source in ("", "stdlib"):
        return [Path(source)] if source else []
    return [file.resolve() for file, _ in _files(Path(source).expanduser())]


def read_documents(sources: Sequence[str], *, pairs: bool = False) -> list[Document]:
    """All documents of the sources.

    Args:
        sources: paths, or "stdlib".
        pairs: whether records are to be pairs of answers (method dpo).

    Raises:
        DataError: a source does not exist, holds nothing, or is not UTF-8 text; records that
            cannot be used, by file and line, all of them up to a bound.
    """
    check_sources(sources)
    found: list[Document] = []
    problems = Problems()
    for source in sources:
        before = len(found), problems.count
        if source == "stdlib":
            if pairs:
                raise DataError("data: 'stdlib' is plain text; method=dpo learns from pairs.")
            found += _standard_library()
        else:
            path = Path(source).expanduser()
            for file, name in _files(path):
                found += _read_file(file, name, problems, pairs=pairs)
        if (len(found), problems.count) == before:
            raise DataError(_nothing(source))
    problems.raise_any()
    return [dataclasses.replace(item, number=number) for number, item in enumerate(found)]


def in_order(documents: Iterable[Document]) -> list[Document]:
    """Documents in an order that depends on their names alone."""
    return sorted(documents, key=lambda item: (_hash(item.name), item.name))


def split_documents(
    documents: list[Document], share: float
) -> tuple[list[Document], list[Document]]:
    """(training, held out): by a hash of the name, or the tail of each text when there are few."""
    held = [item for item in documents if _unit(item.name) < share]
    if held and len(documents) >= _LEAST_DOCUMENTS / share and len(held) < len(documents):
        kept = {id(item) for item in held}
        return [item for item in documents if id(item) not in kept], held
    if all(isinstance(item.record, Text) for item in documents):
        heads, tails = [], []
        for item in documents:
            assert isinstance(item.record, Text)
            text = item.record.text
            cut = int(len(text) * (1 - share))
            heads.append(dataclasses.replace(item, record=Text(text[:cut])))
            tails.append(dataclasses.replace(item, record=Text(text[cut:])))
        return heads, tails
    count = max(1, int(len(documents) * share))
    return documents[count:], documents[:count]


def _files(path: Path) -> list[tuple[Path, str]]:
    if not path.is_dir():
        return [(path, path.name)]
    found = []
    for root, folders, names in os.walk(path):
        # Folders that other tools keep beside texts (.git, .venv), and those of runs.
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and not is_run_folder(Path(root, name))
        ]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    return [
        (file, file.relative_to(path).as_posix())
        for file in sorted(found)
        if file.suffix in (*TEXT_SUFFIXES, ".jsonl") and file.is_file()
    ]


def _nothing(source: str) -> str:
    path = Path(source).expanduser()
    if path.is_file():
        size = path.stat().st_size
        what = "is empty (0 bytes)" if size == 0 else f"holds only white space ({size} bytes)"
        return f"data: {source} {what}. Give a file with text, or leave it out."
    return (
        f"data: the folder {source!r} holds no text. Files ending in "
        f"{', '.join(TEXT_SUFFIXES)} or .jsonl are read."
    )


def _standard_library() -> list[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if not _STDLIB_SKIPPED & set(relative.parts):
            text = file.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                found.append(Document(relative.as_posix(), Text(text), str(file)))
    return found


def _read_file(file: Path, name: str, problems: Problems, *, pairs: bool) -> list[Document]:
    text = _decoded(file)
    if file.suffix != ".jsonl":
        _refuse_tables(file, text)
        if pairs:
            raise DataError(
                f"data: {file} is plain text; method=dpo learns from pairs in .jsonl files."
            )
        return [Document(name, Text(text), str(file))] if text.strip() else []
    found = []
    # Not splitlines(), which also splits at characters that JSON texts may hold as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            found.append(Document(f"{name}:{number}", parse_line(line, pairs=pairs), place))
        except RecordError as error:
            problems.add(place, str(error))
    return found


def _refuse_tables(file: Path, text: str) -> None:
    """Records in another form than JSON lines would be learned as text, brackets and all."""
    first = text.lstrip()[:1]
    json_like = file.suffix in (".json", ".ndjson", ".jsonlines") and first in ("{", "[")
    if json_like or file.suffix in (".csv", ".tsv"):
        raise DataError(
            f"data: {file} seems to hold records, which are read from .jsonl files: one JSON "
            f"object in each line. Convert it, or call it .txt to learn it as it stands."
        )


def _decoded(file: Path) -> str:
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise DataError(f"data: {file} cannot be read: {error.strerror}.") from error
    for mark, encoding in (
        (codecs.BOM_UTF32_LE, "UTF-32"),
        (codecs.BOM_UTF32_BE, "UTF-32"),
        (codecs.BOM_UTF16_LE, "UTF-16"),
        (codecs.BOM_UTF16_BE, "UTF-16"),
    ):
        if raw.startswith(mark):
            raise DataError(
                f"data: {file} is not UTF-8 text: it begins as {encoding} does. Convert it: "
                f"iconv -f {encoding} -t UTF-8."
            )
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(
            f"data: {file} is not UTF-8 text (byte {error.start}, line {line}: "
            f"{raw[error.start : error.start + 1]!r}, {error.reason}). Convert it, or leave it out."
        ) from error


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8], "big")


def _unit(name: str) -> float:
    """A number in [0, 1) of a name, apart from its place in the order; below 0.1 for a tenth."""
    digits, tenth = divmod(_hash(name), 10)
    return (tenth + (digits % 2**32) / 2**32) / 10
