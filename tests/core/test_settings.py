import datetime

import pytest

from doctor.api import Finding
from doctor.core.check_registry import load_registry
from doctor.core.errors import UnusableError
from doctor.core.settings import IgnoreEntry, Settings, read_settings, require_known_limits

CHECK = next(check for check in load_registry(plugins=False).checks if check.id == "NCCL008")


def write(folder, text, name="doctor.toml"):
    (folder / name).write_text(text)
    return folder


def test_without_a_file_there_are_defaults(tmp_path):
    assert read_settings(tmp_path) == Settings()


def test_a_file_above_counts(tmp_path):
    write(tmp_path, 'select = ["nccl"]\nfail-on = "warning"\nplugins = ["more.py"]\n')
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    settings = read_settings(below)
    assert (settings.select, settings.fail_on, settings.withheld) == (("nccl",), "warning", ("more.py",))


def test_the_root_of_a_project_ends_the_search(tmp_path):
    write(tmp_path, 'fail-on = "never"\n')
    below = tmp_path / "a"
    below.mkdir()
    write(below, "[project]\nname = 'x'\n", "pyproject.toml")
    assert read_settings(below) == Settings()


def test_limits_quoted_or_not(tmp_path):
    write(tmp_path, '[limits]\n"MEM003.used_share" = 0.8\nNET024.slow = 2\n')
    assert read_settings(tmp_path).limits == {"MEM003.used_share": 0.8, "NET024.slow": 2}


def test_directories_become_pairs(tmp_path):
    write(tmp_path, '[directories]\ncheckpoint = "/data/runs"\n')
    assert read_settings(tmp_path).directories == (("checkpoint", "/data/runs"),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("select = [", "is not valid TOML"),
        ("selct = []", "doctor.toml: unknown key 'selct'; did you mean select?"),
        (
            "colour = 1",
            "unknown key 'colour'; known are select, ignore, fail-on, preview, lint, timeout, plugins, limits",
        ),
        ('[[ignore]]\nid = "A"\nreasn = "x"\n', "unknown key 'reasn' in ignore[0]; did you mean reason?"),
        ('fail-on = "fatal"', "fail-on: 'fatal' is not one of error, warning, never"),
        ('[[ignore]]\nid = "A"\nreason = "x"\nuntil = "1 May"\n', "ignore[0].until: not a date such as 2026-12-31"),
        ('ignore = ["NET002"]', "ignore"),
        ('[[ignore]]\nid = "NET002"\n', "reason"),
        ('[limits]\n"MEM003.used_share" = "much"\n', "not a finite number"),
        ("timeout = 'long'", "timeout"),
        ("timeout = -1", "the timeout is not within 0.1 and 3600 s"),
        ("timeout = nan", "the timeout is not within 0.1 and 3600 s"),
        ("timeout = 1e300", "the timeout is not within 0.1 and 3600 s"),
        ('[limits]\n"MEM003.used_share" = nan\n', "not a finite number"),
        ('[limits]\n"MEM003.used_share" = inf\n', "not a finite number"),
        ('[directories]\ncheckpoint = "a\\u0000b"\n', "the directory checkpoint is not a path"),
        ('[[ignore]]\nid = "NET002"\nreason = "x"\nuntil = 2026-12-31T00:00:00\n', "until"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path, text, words):
    with pytest.raises(UnusableError) as caught:
        read_settings(write(tmp_path, text))
    assert words in str(caught.value)
    assert "doctor.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_utf8(tmp_path):
    (tmp_path / "doctor.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnusableError, match="is not valid TOML"):
        read_settings(tmp_path)


def test_an_ignore_entry_knows_its_line_host_and_end(tmp_path):
    write(
        tmp_path,
        '# known\n\n[[ignore]]\nid = "NCCL008"\nreason = "rolling upgrade"\nhost = "gpu-*"\nuntil = 2026-12-31\n',
    )
    (entry,) = read_settings(tmp_path).ignore
    assert entry.by == "doctor.toml:4"
    before, after = datetime.date(2026, 12, 31), datetime.date(2027, 1, 1)
    assert entry.covers(CHECK, ("gpu-1", "gpu-2"), before)
    assert not entry.covers(CHECK, ("gpu-1", "login"), before)
    assert not entry.covers(CHECK, (), before)
    assert not entry.covers(CHECK, ("gpu-1",), after)


def test_an_entry_may_name_a_family():
    settings = Settings(ignore=(IgnoreEntry("NCCL", "all of it", by="doctor.toml:1"),))
    assert settings.ignored(CHECK, Finding("x"), ()).reason == "all of it"


def test_a_limit_that_no_check_has_is_refused():
    with pytest.raises(UnusableError, match=r"unknown limit 'NCCL008\.most'"):
        require_known_limits(Settings(limits={"NCCL008.most": 1}), load_registry(plugins=False))


def test_a_limit_in_another_case_is_told_as_it_is_written():
    with pytest.raises(UnusableError, match=r"limit 'MEM003.USED_SHARE'; did you mean MEM003.used_share"):
        require_known_limits(Settings(limits={"MEM003.USED_SHARE": 0.9}), load_registry(plugins=False))


def test_two_entries_of_one_id_have_a_line_each(tmp_path):
    write(
        tmp_path,
        'select = ["NCCL008"]\n# id = "NCCL008"\n'
        '[[ignore]]\nid = "NCCL008"\nreason = "a"\nhost = "a"\n'
        '[[ignore]]\nid = \'NCCL008\'\nreason = "b"\nhost = "b"\n',
    )
    assert [entry.by for entry in read_settings(tmp_path).ignore] == ["doctor.toml:4", "doctor.toml:8"]


@pytest.mark.parametrize(
    "text", ["[project\nname = 'rankdoctor'\n", "tool = 3", 'tool = "doctor"', "[tool.doctors\n", "\x00"]
)
def test_a_project_file_that_does_not_name_us_is_not_ours_to_complain_of(tmp_path, text):
    assert read_settings(write(tmp_path, text, "pyproject.toml")) == Settings()


def test_a_project_file_in_another_encoding_is_passed_over(tmp_path):
    (tmp_path / "pyproject.toml").write_bytes(b"\xff\xfe[\x00")
    assert read_settings(tmp_path) == Settings()


@pytest.mark.parametrize(
    "text", ["[tool.doctor\n", "x = [\n[tool.doctor]\n", '[tool."doctor"]\nx\n', "[[ tool . doctor.ignore ]]\nid"]
)
def test_a_broken_project_file_that_names_us_is_refused(tmp_path, text):
    with pytest.raises(UnusableError, match="is not valid TOML"):
        read_settings(write(tmp_path, text, "pyproject.toml"))


@pytest.mark.parametrize(
    "text",
    [
        "[tool.doctor]\nselect = ['NET']",
        "[tool]\ndoctor.select = ['NET']",
        '[tool]\n"doctor" = {select = ["NET"]}',
        "tool.'doctor'\t.select = ['NET']",
        "tool = {doctor={select = ['NET']}}",
        "[ tool ]\n[ tool . doctor\t]\nselect = ['NET']",
    ],
)
def test_our_table_of_a_project_file_is_found_in_every_form(tmp_path, text):
    assert read_settings(write(tmp_path, text, "pyproject.toml")).select == ("NET",)


def test_a_project_file_that_only_requires_the_package_is_not_parsed(tmp_path, monkeypatch):
    text = '[project]\ndependencies = ["rankdoctor==1.0", "rankdoctor[lightning] >= 1"]\n# doctor\n'
    monkeypatch.setattr("doctor.core.files.settings_file._parsed", lambda *_: pytest.fail("it was parsed"))
    assert read_settings(write(tmp_path, text, "pyproject.toml")) == Settings()


def test_a_directory_of_an_unknown_user_stays_as_it_is(tmp_path):
    write(tmp_path, '[directories]\ncheckpoint = "~nobody-of-that-name/x"\n')
    assert read_settings(tmp_path).directories == (("checkpoint", "~nobody-of-that-name/x"),)
