"""The readers of messages in the source code of Gloo and oneCCL, and how releases are read, on small programs."""

import json
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import software_messages
from message_sources import native_calls
from message_sources.components import COMPONENTS, EVERY_YEAR, printf_calls

GLOO = """
#define GLOO_THROW(...) throw ::gloo::Exception(GLOO_ERROR_MSG(__VA_ARGS__))
GLOO_ENFORCE_LE(op.preamble.length, op.nbytes, "Received data size doesn't match");
GLOO_ENFORCE_NE(rv, -1);
GLOO_ENFORCE(pair != nullptr);
GLOO_ENFORCE(context->getPair(rank), "pair missing (index " + std::to_string(rank) + ")");
signalException(GLOO_ERROR_MSG("Read error ", peer_.str(), ": ", strerror(errno)));
"""
ONECCL = """
CCL_THROW_IF_NOT(size > 0, "unexpected size ", size);
LOG_ERROR("fi_cq_readerr: err: ", err.err, ", prov_err: ", text);
CCL_THROW("can't find algorithm");
"""


def test_what_gloo_throws():
    assert list(dict.fromkeys(native_calls.gloo(GLOO))) == [
        "Received data size doesn't match",
        "rv != -1. %s vs %s",
        "pair != nullptr",
        "pair missing (index %s)",
        "Read error %s: %s",
    ]


def test_what_oneccl_reports():
    assert list(native_calls.oneccl(ONECCL)) == [
        "fi_cq_readerr: err: %s, prov_err: %s",
        "can't find algorithm",
    ]


def test_of_warnings_only_failures_are_read():
    source = 'log_warn("using %d lanes", n); log_warn("failed to open %s", name); log_error("bad state %d", state);'
    assert list(printf_calls("log_error", "log_warn")(source)) == ["failed to open %s", "bad state %d"]


def test_a_clone_without_tags_is_read_year_by_year(tmp_path, monkeypatch):
    def commit(text: str, year: int) -> None:
        (tmp_path / "gloo").mkdir(exist_ok=True)
        (tmp_path / "gloo" / "pair.cc").write_text(text)
        date = {"GIT_COMMITTER_DATE": f"{year}-05-01T00:00:00", "GIT_AUTHOR_DATE": f"{year}-05-01T00:00:00"}
        author = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        git("add", ".")
        git(*author, "commit", "-q", "-m", "x", **date)

    def git(*arguments: str, **environment: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, env={"HOME": str(tmp_path), **environment})

    git("init", "-q")
    commit('GLOO_THROW("Backing context not fully connected");', 2019)
    commit('GLOO_THROW("Cannot connect to self");', 2021)
    messages = tmp_path / "messages"
    messages.mkdir()
    monkeypatch.setattr(software_messages, "MESSAGES", messages)
    gloo = next(one for one in COMPONENTS if one.file == "gloo")
    assert gloo.tags == EVERY_YEAR
    software_messages.update(gloo._replace(checkout="."), tmp_path)
    read = json.loads((messages / "gloo.json").read_text())
    assert {text for texts in read.values() for text in texts} == {
        "Backing context not fully connected",
        "Cannot connect to self",
    }
    described = json.loads((messages / "components.json").read_text())
    assert described[0]["releases"] == ["2019-05-01", "2021-05-01"]


def test_a_list_by_hand_has_one_message_a_line_and_a_class_for_each():
    for component in COMPONENTS:
        folder = Path(component.checkout)
        if folder.is_absolute():
            texts = (folder / "errors.txt").read_text().splitlines()
            assert len(texts) == len({*texts})
            assert software_messages.UNCLASSIFIED not in software_messages.classified(component, texts)
