"""Text and JSON lines into rows, with a part held out; what is wrong with data, by line."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ts_core.errors import DataError
from ts_hf.cli.dataset import make_rows, told_rows
from ts_hf.cli.packed import BinCollator, pack_rows
from ts_hf.cli.pairs import prepare_pairs
from ts_hf.cli.records import Text
from ts_hf.cli.rows import IGNORED, PadCollator, Rows, prepare_rows, split_sources
from ts_hf.cli.settings import FinetuneConfig
from ts_hf.cli.sources import read_documents, split_documents
from ts_hf.testing.letters import Letters, learned_of, text_of


@pytest.fixture
def begin_like(tmp_path: Path) -> Callable[..., FinetuneConfig]:
    """begin_like(source, **changes): settings of rows of 40 tokens."""

    def make(source: str, **changes: Any) -> FinetuneConfig:
        values: dict[str, Any] = {"seq_length": 40, "batch_size": 2, "eval_rows": 4}
        return FinetuneConfig(data=(source,), **{**values, **changes})

    return make


def _folder(tmp_path: Path, count: int, length: int = 100) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(count):
        letter = chr(ord("A") + index)
        (folder / f"{index}.txt").write_text(letter * length)
    return folder


def _rows(sources: list[str], **changes: Any) -> tuple[Rows, Rows]:
    options = {"train_rows": 50, "eval_rows": 8, "seq_length": 10, "held_out": None, **changes}
    train, held = split_sources(sources, options["held_out"], 0.1)
    length = options["seq_length"]
    only = options.get("assistant_only", False)
    tokenizer = options.get("tokenizer", Letters())
    return (
        prepare_rows(
            train,
            tokenizer,
            seq_length=length,
            wanted=options["train_rows"],
            share=4 * length,
            assistant_only=only,
        ),
        prepare_rows(
            held,
            tokenizer,
            seq_length=length,
            wanted=options["eval_rows"],
            share=length,
            assistant_only=only,
            what="held out",
        ),
    )


def test_documents_are_held_out_whole(tmp_path: Path) -> None:
    train, held = _rows([str(_folder(tmp_path, 40))])
    assert len(train) == 50 and len(held) == 8
    assert train.tokens == 500
    letters = {c for row in train.items for c in text_of(row)} - {"\0"}
    others = {c for row in held.items for c in text_of(row)} - {"\0"}
    assert letters and others and not letters & others
    for row in (*train.items, *held.items):
        assert torch.equal(row["input_ids"], row["labels"])
    assert len(held.openings) == 8 and all(len(opening) == 5 for opening in held.openings)


def test_share_to_hold_out() -> None:
    documents = read_documents(["stdlib"])
    for share in (0.05, 0.3):
        train, held = split_documents(documents, share)
        assert share * 0.7 < len(held) / len(documents) < share * 1.3
        assert not {d.name for d in train} & {d.name for d in held}
        assert len(train) + len(held) == len(documents)


def test_rows_come_from_many_documents(tmp_path: Path) -> None:
    train, held = _rows([str(_folder(tmp_path, 60, length=4000))], train_rows=20, eval_rows=4)
    assert len({text_of(row)[0] for row in held.items}) == 4  # a row per document, not four of one
    assert len({text_of(row)[0] for row in train.items}) >= 4


def test_second_pass_uses_what_the_first_left(tmp_path: Path) -> None:
    """More rows wanted than the excerpts give: all of the text is used, none of it twice."""
    folder = tmp_path / "t"
    folder.mkdir()
    text = "".join(f"{number:06d}\n" for number in range(400))
    (folder / "a.txt").write_text(text)
    train, held = _rows([str(folder)], seq_length=7, train_rows=10_000, eval_rows=10_000)
    lines = [text_of(row) for row in (*train.items, *held.items)]
    whole = "".join(lines).replace("\0", "")
    numbers = [n for n in whole.split("\n") if len(n) == 6]
    assert len(set(numbers)) == len(numbers) > 380


def test_few_texts_hold_out_their_tails(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 900 + "y" * 100)
    train, held = _rows([str(tmp_path / "a.txt")])
    assert "y" not in "".join(text_of(row) for row in train.items)
    assert "x" not in "".join(text_of(row) for row in held.items)


def test_held_out_path(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 300)
    (tmp_path / "b.txt").write_text("y" * 300)
    train, held = _rows([str(tmp_path / "a.txt")], held_out=str(tmp_path / "b.txt"))
    assert {text_of(row).strip("\0")[0] for row in train.items} == {"x"}
    assert {text_of(row).strip("\0")[0] for row in held.items} == {"y"}


def test_same_rows_every_time_and_fingerprint(tmp_path: Path) -> None:
    folder = _folder(tmp_path, 30)
    marks = []
    for content in (None, None, "changed " * 20):
        if content is not None:
            for file in folder.iterdir():
                file.write_text(content)
        train, held = _rows([str(folder)], train_rows=10_000, eval_rows=10_000)
        marks.append((train.fingerprint(), held.fingerprint()))
    assert marks[0] == marks[1] != marks[2]


def test_standard_library() -> None:
    documents = read_documents(["stdlib"])
    names = {document.name for document in documents}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any(name.startswith(("test/", "encodings/", "site-packages/")) for name in names)
    with pytest.raises(DataError, match="'stdlib' is plain text"):
        read_documents(["stdlib"], pairs=True)


def _jsonl(file: Path, *records: Any) -> str:
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    file.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return str(file)


def _trained(tmp_path: Path, *records: Any, **changes: Any) -> Rows:
    """Rows of the records, with other data held out."""
    held = tmp_path / "held.jsonl"
    _jsonl(held, {"messages": [{"role": "assistant", "content": "zzzz"}]})
    changes = {"seq_length": 60, **changes}
    source = _jsonl(tmp_path / "data.jsonl", *records)
    return _rows([source], held_out=str(held), **changes)[0]


def test_records(tmp_path: Path) -> None:
    train = _trained(
        tmp_path,
        {"text": "plain " * 20},
        {"prompt": "ab", "completion": "cde"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {
            "prompt": [{"role": "user", "content": "q"}],
            "completion": [{"role": "assistant", "content": "answer"}],
        },
    )
    by_text = {text_of(row): row for row in train.items}
    # The prompt counts for nothing, the completion and the end do.
    row = by_text["abcde\0"]
    assert row["labels"].tolist() == [IGNORED, IGNORED, ord("c"), ord("d"), ord("e"), 0]
    assert learned_of(by_text["<user>hi|\n"]) == "<user>hi|\n"
    assert learned_of(by_text["<user>q|\n<assistant>answer|\n"]) == "answer|\n"
    assert any(text.startswith("plain") for text in by_text)


def test_records_keep_the_characters_that_are_no_line_ends(tmp_path: Path) -> None:
    text = "a\u2028b\x85c\x0bd"
    train = _trained(tmp_path, json.dumps({"prompt": "p", "completion": text}, ensure_ascii=False))
    assert text_of(train.items[0]) == f"p{text}\0"


def test_windows_line_ends_and_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (document,) = read_documents([str(tmp_path / "a.txt")])
    assert document.record == Text("one\ntwo\n")


CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": " first "},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "second"},
]


@pytest.mark.parametrize("fast", [True, False])
def test_only_what_the_assistant_says(
    fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Letters, "is_fast", fast)
    train = _trained(tmp_path, {"messages": CHAT}, assistant_only=True, seq_length=90)
    (row,) = train.items
    assert learned_of(row) == "first|second|"
    assert (
        text_of(row)
        == "<system>s|\n<user>one?|\n<assistant>first|\n<user>first|\n<assistant>second|\n"
    )
    # A sample goes on where the last answer begins.
    assert "".join(map(chr, train.openings[0])).endswith("<user>first|\n<assistant>")
    everything = _trained(tmp_path, {"messages": CHAT}, seq_length=90)
    assert torch.equal(everything.items[0]["labels"], row["input_ids"])
    assert everything.openings == train.openings


def test_only_the_assistant_with_a_template_that_changes_earlier_turns(tmp_path: Path) -> None:
    """As templates of reasoning models do, which drop earlier thoughts."""

    class Thinking(Letters):
        def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
            last = len(messages) - 1
            parts = []
            for index, message in enumerate(messages):
                content = message["content"]
                if message["role"] == "assistant":
                    thought, _, answer = content.rpartition("#")
                    content = f"[{thought}]{answer}" if index == last else answer
                parts.append(f"<{message['role']}>{content}|\n")
            return "".join(parts)

    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "hm#yes"},
        {"role": "user", "content": "v"},
        {"role": "assistant", "content": "so#no"},
    ]
    train = _trained(
        tmp_path, {"messages": messages}, assistant_only=True, tokenizer=Thinking(), seq_length=90
    )
    assert text_of(train.items[0]) == "<user>u|\n<assistant>yes|\n<user>v|\n<assistant>[so]no|\n"
    assert learned_of(train.items[0]) == "yes|so]no|"


def test_records_that_are_cut_or_left_out_are_counted(tmp_path: Path) -> None:
    train = _trained(
        tmp_path,
        {"prompt": "longer than the row", "completion": "x"},
        {"prompt": "a", "completion": "longer than the row"},
        {"prompt": "a", "completion": "b"},
        seq_length=10,
    )
    assert sorted(text_of(row) for row in train.items) == ["ab\0", "alonger th"]
    assert len(train.notes) == 2
    assert train.notes[0].startswith("2 of 3 records are longer than seq_length=10 tokens")
    assert train.notes[1].startswith("1 records are left out")


def test_nothing_left_to_learn_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no record to train on: the data has one only"):
        _rows([_jsonl(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"})])
    long = [{"prompt": "a" * 50, "completion": "b"}] * 4
    with pytest.raises(DataError, match=r"seq_length=10 .* any of the 4 records to train on"):
        _rows([_jsonl(tmp_path / "b.jsonl", *long)], held_out=_jsonl(tmp_path / "c.jsonl", *long))
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    train, _ = split_sources([_jsonl(tmp_path / "d.jsonl", pair)], None, 0.1, pairs=True)
    with pytest.raises(DataError, match="no record to train on: the data has one only"):
        prepare_pairs(train, Letters(), seq_length=9, wanted=1)


def test_what_the_chat_template_refuses_is_named_by_line(tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "hi"}]}
    bad = {"messages": [{"role": "nobody", "content": "hi"}]}
    with pytest.raises(DataError, match=r"line 2: the model's chat template refuses it \(ValueE"):
        _trained(tmp_path, good, bad)
    with pytest.raises(DataError, match=r"line 1: assistant_only=true, but no turn"):
        _trained(tmp_path, good, assistant_only=True)


def test_messages_need_a_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "chat_template", None)
    with pytest.raises(DataError, match=r"data\.jsonl, line 1: .*no chat template"):
        _trained(tmp_path, {"messages": [{"role": "user", "content": "hi"}]})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a"', r"line 2: not valid JSON .*: \{\"text\": \"a\"$"),
        ("[1, 2]", r"line 2: expected a JSON object, found \[1, 2\] \(a list\)"),
        ("[" * 100_000, "line 2: n"),
        ('{"text": "a", "text": "b"}', 'line 2: an object has the key "text" twice'),
        ('{"txt": "a"}', r"line 2: expected 'text', 'messages'.*found the keys \['txt'\]"),
        ("{}", "line 2: expected 'text', .*found no keys"),
        ('{"text": "  "}', r'line 2: .text. is empty \("  "\)'),
        ('{"text": 3}', r"line 2: 'text' is 3 \(a number\); expected a text"),
        ('{"text": null}', r"line 2: 'text' is null; expected a text"),
        ('{"text": true}', r"line 2: 'text' is true; expected"),
        ('{"text": "ab\\ud800c"}', r"line 2: text has half of a surrogate pair at character 2"),
        ('{"messages": []}', r"line 2: 'messages' is \[\] \(a list\); expected a list of messages"),
        ('{"messages": "hi"}', r'line 2: .messages. is "hi" \(a text\)'),
        ('{"messages": ["hi"]}', r'line 2: messages\[0\] is "hi" \(a text\); expected an object'),
        ('{"messages": [{"role": "user"}]}', r"line 2: messages\[0\] has no 'content'; found the"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": 1, "content": "b"}]}',
            r"line 2: messages\[1\]\['role'\] is 1 \(a number\)",
        ),
        ('{"messages": [{"role": "", "content": "a"}]}', r"line 2: messages\[0\]\['role'\] is emp"),
        ('{"prompt": "a", "completion": ""}', "line 2: 'completion' is empty"),
        ('{"prompt": 5, "completion": "a"}', r"line 2: 'prompt' is 5 .*or a list of messages"),
        (
            '{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}',
            "line 2: 'prompt' is a text, 'completion' is a list of messages",
        ),
        ('{"prompt": "p", "chosen": "a", "rejected": "b"}', "line 2: .* are for method=dpo"),
    ],
)
def test_broken_records_are_named_by_line(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=words) as caught:
        read_documents([str(file)])
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_all_broken_records_are_listed_up_to_a_bound(tmp_path: Path) -> None:
    first = _jsonl(tmp_path / "a.jsonl", *['{"text": "fine"}', '{"text": 1}'] * 15)
    second = _jsonl(tmp_path / "b.jsonl", *['{"text": 2}'] * 15)
    with pytest.raises(DataError) as caught:
        read_documents([first, second])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("data: 30 records cannot be used.")
    assert len(lines) == 22 and lines[-1] == "  and 10 more"
    assert [line for line in lines if "b.jsonl, line 5:" in line]


def test_sources_that_are_not_usable(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file or folder '/no/such', '/nor/this'"):
        read_documents(["/no/such", "stdlib", "/nor/this"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match="holds no text"):
        read_documents([str(tmp_path / "empty")])
    (tmp_path / "latin.txt").write_bytes(b"one\ncaf\xe9")
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8 text \(byte 7, line 2: b'\\xe9'"):
        read_documents([str(tmp_path / "latin.txt")])
    (tmp_path / "wide.jsonl").write_text('{"text": "a"}', encoding="utf-16")
    with pytest.raises(DataError, match=r"wide\.jsonl .*begins as UTF-16 does\. .*iconv -f UTF-16"):
        read_documents([str(tmp_path / "wide.jsonl")])
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(DataError, match=r"none\.jsonl is empty \(0 bytes\)"):
        read_documents([str(tmp_path / "none.jsonl")])
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"blank\.txt holds only white space \(2 bytes\)"):
        read_documents([str(tmp_path / "blank.txt")])
    (tmp_path / "list.json").write_text('[{"text": "a"}]')
    (tmp_path / "table.csv").write_text("text\na\n")
    for name in ("list.json", "table.csv"):
        with pytest.raises(DataError, match=f"{name} seems to hold records"):
            read_documents([str(tmp_path / name)])
    (tmp_path / "short.txt").write_text("ab")
    with pytest.raises(DataError, match="less than one row of 10"):
        _rows([str(tmp_path / "short.txt")])
    with pytest.raises(DataError, match=r"short\.txt is plain text; method=dpo"):
        read_documents([str(tmp_path / "short.txt")], pairs=True)


def test_collator_pads_to_the_longest() -> None:
    rows = [
        {"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])},
        {"input_ids": torch.tensor([4]), "labels": torch.tensor([4])},
    ]
    batch = PadCollator(9)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, IGNORED, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert "attention_mask" not in PadCollator(9)(rows[:1])


def test_packed_rows_hold_every_record_once(tmp_path: Path) -> None:
    records = [{"prompt": "p", "completion": chr(ord("a") + i) * (1 + i % 7)} for i in range(26)]
    rows = _trained(tmp_path, *records, seq_length=20, train_rows=10_000)
    packed = pack_rows(rows, 20)
    assert len(packed) < 10 and packed.notes[-1].startswith("packing: 26 records in ")
    batch = BinCollator(20, 9)(packed.items)
    assert batch["input_ids"].shape == (len(packed), 20)
    pieces = []
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), 20]
        for begin, end in itertools.pairwise(starts):
            pieces.append("".join(map(chr, ids[begin:end].tolist())))
    found = sorted(piece for piece in pieces if piece != "\t")
    assert found == sorted(text_of(row) for row in rows.items)
    learned = sorted(batch["labels"][batch["labels"] != IGNORED].tolist())
    assert learned == sorted(
        token for row in rows.items for token in row["labels"][1:].tolist() if token != IGNORED
    )


def test_packing_takes_as_many_records_as_fill_the_rows(tmp_path: Path) -> None:
    records = [{"prompt": "p", "completion": f"{i:08d}"} for i in range(100)]
    documents = read_documents([_jsonl(tmp_path / "d.jsonl", *records)])
    rows = prepare_rows(documents, Letters(), seq_length=20, wanted=5, share=80, full_rows=True)
    assert len(rows) == 10  # of 10 tokens each
    assert len(pack_rows(rows, 20)) == 5


def test_what_the_chat_template_refuses_is_told_in_the_order_of_the_file(
    tmp_path: Path, begin_like: Callable[..., FinetuneConfig]
) -> None:
    """Records are trained on in an order of their own, and some are held out."""

    class Strict(Letters):
        def apply_chat_template(self, messages: list[Any], **options: Any) -> str:
            if "bad" in messages[0]["content"]:
                raise ValueError("no bad words")
            return super().apply_chat_template(messages, **options)

    records = [
        {"messages": [{"role": "user", "content": "bad" if n % 2 else f"good {n}"}]}
        for n in range(60)
    ]
    config = begin_like(_jsonl(tmp_path / "data.jsonl", *records))
    documents = split_sources(config.data, None, config.held_out_share)
    with pytest.raises(DataError, match="30 records cannot be used") as caught:
        make_rows(config, documents, Strict())
    numbers = [int(found) for found in re.findall(r"data.jsonl, line (\d+):", str(caught.value))]
    assert numbers == list(range(2, 42, 2)) and "and 10 more" in str(caught.value)


def test_the_rows_of_a_part_say_of_how_many(
    tmp_path: Path, begin_like: Callable[..., FinetuneConfig]
) -> None:
    records = [{"prompt": "ab", "completion": f"{n:04d}"} for n in range(201)]
    source = _jsonl(tmp_path / "data.jsonl", *records)

    def told(source: str, **changes: Any) -> tuple[Rows, list[str]]:
        config = begin_like(source, **changes)
        documents = split_sources(config.data, None, config.held_out_share)
        train, held_out = make_rows(config, documents, Letters())
        return train, told_rows(config, train, held_out)

    train, lines = told(source, steps=10)
    held_out = 201 - (train.of or 0)
    assert (len(train), held_out > 10) == (20, True)
    assert lines[0].startswith(
        f"20 of {201 - held_out} rows to train on (140 tokens), 4 of {held_out}"
    )
    assert (
        lines[1].startswith("only as much is read as 10 steps of 2 rows need")
        and "epochs=1 reads all" in lines[1]
    )
    _, lines = told(source, steps=10, batch_size=1, accumulation=1)
    assert lines[1].startswith("only as much is read as 10 steps of 1 row need")
    train, lines = told(source, epochs=1.0)
    assert lines[0].startswith(f"{201 - held_out} rows to train on") and len(lines) == 1
    packed, lines = told(source, steps=3, packing=True)
    wanted = (201 - held_out) * len(packed) / (6 * 40 // 7 + 1)
    assert packed.estimated and packed.of == pytest.approx(wanted, abs=2)
    folder = _folder(tmp_path, 40, length=400)
    train, lines = told(str(folder), steps=10)
    assert train.estimated and f"20 of about {train.of} rows" in lines[0]
    everything, lines = told(str(folder), steps=10_000)
    assert everything.of is None and train.of == pytest.approx(len(everything), abs=1)
