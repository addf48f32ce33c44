"""Archives that would escape, fill the disk or the memory, or never end: bounded, said, never healthy."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from doctor.core.errors import UnusableError
from doctor.core.files.read_deadline import ReadDeadline
from doctor.postmortem.inputs import read_inputs
from doctor.postmortem.run_reader import KINDS, read_runs
from doctor.postmortem.sandbox import archives, decompression
from doctor.postmortem.unpacked_archives import UnpackedArchives

FAILED = b"[rank1]: ValueError: no such column\n"


def tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def zipped(*members: tuple[str, bytes], mode: int = stat.S_IFREG | 0o600) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
            archive.writestr(info, content)
    return data.getvalue()


def read(path: Path, data: bytes) -> dict[str, str | None]:
    """Return the inputs of an archive that are listed, with the reasons to skip them or their notes."""
    path.write_bytes(data)
    with UnpackedArchives() as unpacked:
        try:
            inputs = read_inputs([path], KINDS, several_runs=True, archives=unpacked)
        except UnusableError as error:
            return {"": str(error)}
        return {
            one.path.removeprefix(f"{path}/"): one.skipped or next(iter(one.notes or ()), None)
            for one in inputs.listed()
        }


def copies(data: bytes, tmp_path: Path, **limits: object) -> archives.ArchiveContents:
    """The members that are copied in this process, with other limits."""
    path, folder = tmp_path / "archive", tmp_path / "copies"
    path.write_bytes(data)
    folder.mkdir()
    found = archives._Copies(folder, int(limits.pop("most", 1 << 20)), 60.0, patient=True)  # type: ignore[call-overload]
    for name, value in limits.items():
        setattr(found, name, value)
    with path.open("rb") as stream:
        return found.of(stream)


ESCAPING = ("../../escaped.log", "/escaped.log", "..\\escaped.log", "a/../../escaped.log", "C:\\escaped.log")


@pytest.mark.parametrize("form", [lambda name: tar((entry(name), FAILED)), lambda name: zipped((name, FAILED))])
@pytest.mark.parametrize("name", ESCAPING)
def test_names_are_never_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Callable[[str], bytes], name: str
) -> None:
    inside, temporary = tmp_path / "inside" / "job", tmp_path / "temporary"
    inside.mkdir(parents=True)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = {*tmp_path.rglob("*")}
    (shown,) = read(inside / "logs.archive", form(name))
    assert shown.endswith("escaped.log")
    assert ".." not in shown
    assert {*tmp_path.rglob("*")} - before == {inside / "logs.archive"}
    assert not Path("/escaped.log").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_of_a_tar_are_not_followed(tmp_path: Path, kind: bytes) -> None:
    data = tar((entry("passwd.log", kind, "/etc/passwd"), b""), (entry("job.log"), FAILED))
    assert read(tmp_path / "logs.tar", data) == {"passwd.log": "it is a link or a device", "job.log": None}


def test_links_of_a_zip_are_not_followed(tmp_path: Path) -> None:
    data = zipped(("passwd.log", b"/etc/passwd"), mode=stat.S_IFLNK | 0o777)
    assert "it is a link or a device" in read(tmp_path / "logs.zip", data)[""]  # type: ignore[operator]


def test_an_archive_that_grows_too_much_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "UNSUSPECTED", 1 << 20)
    found = copies(zipped(("a.log", b"step 1\n" * (1 << 20))), tmp_path, most=1 << 30)
    assert found.cut is not None
    assert found.cut.startswith("it unpacks to more than ")
    assert found.size < 6 << 20


def test_a_packed_tar_that_grows_too_much_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gzip

    monkeypatch.setattr(decompression, "UNSUSPECTED", 1 << 20)
    found = copies(gzip.compress(tar((entry("a.log"), b"step 1\n" * (1 << 20)))), tmp_path, most=1 << 30)
    assert found.cut is not None
    assert found.size < 8 << 20


def test_the_size_of_all_members_is_bounded(tmp_path: Path) -> None:
    found = copies(tar((entry("a.log"), FAILED * 1000), (entry("b.log"), FAILED * 1000)), tmp_path, most=50_000)
    assert found.cut == "its members have more than 0 MiB"
    assert sum(path.stat().st_size for path in (tmp_path / "copies").iterdir()) <= 50_000


def test_the_number_of_members_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MOST_MEMBERS", 5)
    found = copies(zipped(*((f"{number}.log", FAILED) for number in range(9))), tmp_path)
    assert len(found.members) == 5
    assert found.cut == "only its first 5 members were read"


def test_the_time_is_bounded(tmp_path: Path) -> None:
    found = copies(zipped(("a.log", FAILED)), tmp_path, _deadline=ReadDeadline(0.0))
    assert found.cut is not None
    assert found.cut.startswith("unpacking it took longer than ")


def test_the_depth_is_bounded(tmp_path: Path) -> None:
    data = FAILED
    for name in ("job.log", "a.zip", "b.zip", "c.zip"):
        data = zipped((name, data))
    assert "archives in archives are read 2 deep" in str(read(tmp_path / "d.zip", data))


def test_a_header_that_takes_too_much_memory_is_damage(tmp_path: Path) -> None:
    """A pax header is read whole, whatever its size."""
    info = entry("x", tarfile.XHDTYPE)
    info.size = 900 << 20
    path = tmp_path / "logs.tar"
    with path.open("wb") as stream:
        stream.write(info.tobuf(tarfile.USTAR_FORMAT))
        stream.truncate(info.size + 2048)
    assert read_reason(path)


def read_reason(path: Path) -> str:
    with UnpackedArchives() as unpacked, pytest.raises(UnusableError) as caught:
        read_inputs([path], KINDS, archives=unpacked)
    return str(caught.value)


DAMAGED = {
    "a tar that ends too early": tar((entry("a.log"), FAILED * 2000))[:20_000],
    "a zip that ends too early": zipped(("a.log", os.urandom(4000).hex().encode()))[:-40],
    "a zip with a damaged member": zipped(("a.log", os.urandom(4000).hex().encode())).replace(b"a.log", b"b.log", 1),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_archive_is_never_healthy(tmp_path: Path, name: str) -> None:
    (tmp_path / "logs.archive").write_bytes(DAMAGED[name])
    (tmp_path / "job.log").write_bytes(b"Trainer.fit stopped: max_epochs=3 reached.\n" * 10)
    runs = read_runs([tmp_path / "logs.archive", tmp_path / "job.log"])
    listed = [one for one in runs[0].inputs if one.path.endswith("logs.archive")]
    assert listed[0].skipped or listed[0].notes


def test_checkpoints_in_a_folder_are_not_unpacked(tmp_path: Path) -> None:
    """torch.save writes zip archives."""
    (tmp_path / "last.ckpt").write_bytes(zipped(("archive/data.pkl", b"\x80\x02."), ("archive/notes.log", FAILED)))
    (tmp_path / "job.log").write_bytes(FAILED)
    (run,) = read_runs([tmp_path])
    assert [(Path(one.path).name, one.skipped is None) for one in run.inputs] == [
        ("job.log", True),
        ("last.ckpt", False),
    ]


def test_an_archive_of_a_data_set_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "UNREADABLE", 5)
    found = copies(
        tar(*((entry(f"{number}.jpg"), bytes(range(256)) * 9) for number in range(20))), tmp_path, _patient=False
    )
    assert found.cut == "none of its first 5 members is evidence"


def test_encrypted_members_are_said(tmp_path: Path) -> None:
    data = bytearray(zipped(("a.log", FAILED)))
    directory = data.rindex(b"PK\x01\x02")
    data[directory + 8] |= 1
    assert "it is encrypted" in read_reason_of(tmp_path, bytes(data))


def read_reason_of(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "logs.zip"
    path.write_bytes(data)
    return read_reason(path)


def test_the_time_of_all_archives_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "logs.zip"
    path.write_bytes(zipped(("a.log", FAILED)))
    with UnpackedArchives(0.0) as unpacked, pytest.raises(UnusableError, match="the time or the size"):
        unpacked.members_of(path, named=True)


def test_the_copies_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "logs.zip"
    path.write_bytes(zipped(("a.log", FAILED)))
    with UnpackedArchives() as unpacked:
        ((copy, why),), cut = unpacked.members_of(path, named=True)
        assert (copy.read_bytes(), stat.S_IMODE(copy.parent.stat().st_mode), why, cut) == (FAILED, 0o700, None, None)
    assert not copy.parent.parent.exists()
