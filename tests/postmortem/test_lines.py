"""Bytes of any kind into lines: packed, in other encodings, without ends, damaged."""

from __future__ import annotations

import builtins
import gzip
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from doctor.core.errors import UnusableError
from doctor.core.facts import Event, LogFile
from doctor.postmortem.logs import lines
from doctor.postmortem.logs.scanner import read_lines, read_log
from doctor.postmortem.sandbox import decompression
from doctor.postmortem.sandbox import zstd as zstandard_or_not
from tests.lab.cases import each_case

OOM = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB."
TEXT = f"step 1\n{OOM}\nstep 2\n"


def read(tmp_path: Path, data: bytes) -> tuple[list[Event], LogFile]:
    path = tmp_path / "job.log"
    path.write_bytes(data)
    return read_log(path, "job.log")


def raised(events: list[Event]) -> list[tuple[int | None, int]]:
    return [(event.rank, event.line) for event in events if event.kind == "python.exception"]


def zstd(data: bytes) -> bytes:
    assert zstandard_or_not._module() is not None
    packed: bytes = zstandard_or_not._module().compress(data)
    return packed


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(lambda text: text.encode(), id="plain"),
        pytest.param(lambda text: b"\xef\xbb\xbf" + text.encode(), id="byte order mark"),
        pytest.param(lambda text: text.replace("\n", "\r\n").encode(), id="Windows"),
        pytest.param(lambda text: text.encode("utf-16"), id="UTF-16"),
        pytest.param(lambda text: b"\xfe\xff" + text.encode("utf-16-be"), id="UTF-16, big end first"),
        pytest.param(lambda text: text.encode("utf-16-le"), id="UTF-16 without a mark"),
        pytest.param(lambda text: gzip.compress(text.encode()), id="gzip"),
        pytest.param(
            lambda text: gzip.compress(text[:20].encode()) + gzip.compress(text[20:].encode()), id="two members"
        ),
        pytest.param(lambda text: gzip.compress(text.encode()) + bytes(512), id="gzip, padded"),
        pytest.param(lambda text: zstd(text.encode()), id="zstd"),
        pytest.param(lambda text: zstd(text[:20].encode()) + zstd(text[20:].encode()), id="two frames"),
    ],
)
def test_any_kind_of_file_is_read(tmp_path: Path, packed) -> None:
    events, file = read(tmp_path, packed(TEXT))
    assert raised(events) == [(3, 2)]
    assert (file.lines, file.ranks, file.cut) == (3, (3,), None)


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_the_last_line_needs_no_end(tmp_path: Path, end: bytes) -> None:
    events, file = read(tmp_path, b"step 1\n" + OOM.encode() + end)
    assert (raised(events), file.lines) == ([(3, 2)], 2)


def test_an_empty_file_is_a_log_without_lines(tmp_path: Path) -> None:
    assert read(tmp_path, b"") == ([], LogFile("job.log"))
    assert read_lines([], "x") == ([], LogFile("x"))


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_a_truncated_archive_is_read_as_far_as_it_goes(tmp_path: Path, pack) -> None:
    noise = random.Random(1).randbytes(400_000).hex().encode()
    events, file = read(tmp_path, pack(TEXT.encode() + noise)[:-100_000])
    assert raised(events) == [(3, 2)]
    assert file.cut is not None
    assert "too early" in file.cut


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_a_damaged_archive_says_so(tmp_path: Path, pack) -> None:
    packed = bytearray(pack(TEXT.encode() + random.Random(1).randbytes(100_000).hex().encode()))
    packed[40_000:40_100] = b"\xff" * 100
    _, file = read(tmp_path, bytes(packed))
    assert file.cut is not None


def test_other_bytes_after_an_archive_are_not_read(tmp_path: Path) -> None:
    events, file = read(tmp_path, gzip.compress(TEXT.encode()) + b"something else\n" + OOM.encode())
    assert raised(events) == [(3, 2)]
    assert file.cut == "bytes that are not gzip data follow its archive"


def test_without_a_package_for_zstd_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = zstd(TEXT.encode())
    monkeypatch.setattr(zstandard_or_not.importlib, "import_module", _missing)
    events, file = read(tmp_path, packed)
    assert events == []
    assert file.cut is not None
    assert "backports.zstd unpacks" in file.cut


def _missing(name: str) -> object:
    raise ModuleNotFoundError(name)


def test_an_archive_that_grows_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decompression, "UNSUSPECTED", 1 << 20)
    monkeypatch.setattr(decompression, "RATIO", 100)
    _, file = read(tmp_path, gzip.compress(TEXT.encode() + bytes(64 << 20)))
    assert file.cut is not None
    assert file.cut.startswith("it unpacks to more than")
    assert file.bytes < 8 << 20


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
@pytest.mark.parametrize("byte", [b"\0", b"\r", b"a", b"\x1b"])
def test_a_line_without_end_takes_constant_memory(tmp_path: Path, pack, byte: bytes) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(pack(byte * (24 << 20) + TEXT.encode()))
    read_log(path, "job.log")
    tracemalloc.start()
    events, file = read_log(path, "job.log")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20
    assert file.lines == 3
    assert raised(events) == [(3, 2)]


def test_what_a_writer_appends_meanwhile_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(TEXT)
    with path.open("rb", buffering=0) as stream:
        size = path.stat().st_size
        path.write_text(TEXT * 2)
        assert b"".join(decompression.Unpacked(stream, size)) == TEXT.encode()


def test_a_file_that_can_not_be_opened_is_unusable(tmp_path: Path) -> None:
    with pytest.raises(UnusableError, match=r"^job\.log can't be read: No such file"):
        read_log(tmp_path / "missing", "job.log")
    with pytest.raises(UnusableError):
        read_log(tmp_path, "folder")


def test_an_error_while_reading_ends_the_log(tmp_path: Path) -> None:
    class Broken:
        def __init__(self) -> None:
            self.data = iter([TEXT.encode()[:4], TEXT.encode()[4:]])

        def read(self, most: int) -> bytes:
            for piece in self.data:
                return piece
            raise OSError(5, "Input/output error")

    pieces = decompression.Unpacked(Broken(), 10_000)  # type: ignore[arg-type]
    assert b"".join(pieces) == TEXT.encode()
    assert pieces.cut == "it could not be read any further: Input/output error"


def test_what_a_progress_bar_wrote_over_is_one_line() -> None:
    bars = "\r".join(f"{step}%|##  | {step}/100 [00:01<00:02, 1.2it/s]" for step in range(100))
    events, file = read_lines([bars + "\r" + OOM, "next"], "x")
    assert raised(events) == [(3, 1)]
    assert file.lines == 2


def test_colours_are_no_part_of_a_line() -> None:
    line = "\x1b[36m[rank3]:\x1b[0m \x1b[1;31mtorch.OutOfMemory\x1b[0mError: CUDA out of \x1b[35mmemory."
    events, _ = read_lines([line], "x")
    assert [(event.kind, event.text) for event in events if event.kind == "python.exception"] == [
        ("python.exception", "torch.OutOfMemoryError: CUDA out of memory.")
    ]


def test_other_bytes_than_utf8_are_replaced(tmp_path: Path) -> None:
    events, _ = read(tmp_path, b"caf\xe9\n" + OOM.encode() + b" \xe9\n")
    assert raised(events) == [(3, 2)]


def test_of_a_long_line_its_head_and_what_is_known_are_looked_at() -> None:
    long = "[rank3]: " + "x" * 300_000 + " CUDA out of memory. Tried to allocate 4.00 GiB. " + "y" * 300_000
    events, _ = read_lines(["first", long, "last"], "x")
    assert {(event.rank, event.line) for event in events} == {(3, 2)}
    assert max(len(event.text) for event in events) <= 600


def test_a_line_of_several_blocks_keeps_its_number() -> None:
    block = lines.BLOCK
    events, file = read_lines(["a" * (3 * block), OOM], "x")
    assert raised(events) == [(3, 2)]
    assert file.lines == 2


@pytest.mark.parametrize("shift", range(0, 64, 7))
def test_what_lies_between_two_blocks_is_found(shift: int) -> None:
    filler = "x" * (lines.BLOCK - 40 + shift)
    events, _ = read_lines([filler[: lines.BLOCK // 2], filler[lines.BLOCK // 2 :], OOM, "end"], "x")
    assert raised(events) == [(3, 3)]


def test_blocks_hold_all_bytes_once() -> None:
    chance = random.Random(3)
    data = b"".join(chance.randbytes(chance.randrange(50)).replace(b"\x1b", b"") + b"\n" for _ in range(100_000))

    def pieces() -> Iterator[bytes]:
        yield b"ab\n"
        yield from (data[start : start + 70_001] for start in range(0, len(data), 70_001))

    assert b"".join(lines.blocks_of(pieces())) == b"ab\n" + data.replace(b"\0", b"")


def test_nothing_that_is_packed_is_imported_for_plain_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest, **named):
        assert "zstd" not in name
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    events, _ = read(tmp_path, TEXT.encode())
    assert raised(events) == [(3, 2)]


def joined(*rows: str) -> list[str]:
    return b"".join(lines.blocks_of(["\n".join(rows).encode()])).decode().split("\n")


def test_rows_of_a_terminal_are_joined_and_lines_keep_their_numbers() -> None:
    text = "(raylet) A worker died or was killed: " + "".join(f"detail{number}of" for number in range(40))
    rows = [text[at : at + 90] for at in range(0, len(text), 90)]
    assert joined(*rows, "[next] line") == [text, *[""] * (len(rows) - 1), "[next] line"]


@each_case(
    "rows",
    [
        [
            f"{task}: DistStoreError: wait timeout after 12000ms, keys: /default_pg/0//cpu//0//of_rank/{task}"
            for task in range(4)
        ],
        [
            f"NVRM: Xid (PCI:0000:{bus}:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error"
            for bus in range(10, 14)
        ],
        ["│ " + "a" * 76 + " │", "│ " + "b" * 76 + " │", "╰" + "─" * 78 + "╯"],
    ],
)
def test_lines_of_one_length_by_their_format_stay_apart(rows: list[str]) -> None:
    assert joined(*rows) == rows


def test_entities_are_read_only_in_the_source_of_a_page() -> None:
    assert joined("File &quot;train.py&quot;, in &lt;module&gt;", "a &amp; b") == [
        'File "train.py", in <module>',
        "a & b",
    ]
    own = ["<frozen runpy> printed &lt;module&gt;", "a &amp; b"]
    assert joined(*own) == own
