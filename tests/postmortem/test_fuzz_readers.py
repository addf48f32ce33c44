"""Readers of snapshots, of nvidia-smi and of RAS read anything: they answer, or say in one sentence why they can't."""

import copyreg
import io
import pickle
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doctor.core.errors import UnusableError
from doctor.core.facts.section import in_unicode
from doctor.core.files.safe_pickle import load_plain
from doctor.postmortem.memory_snapshot.snapshot_parser import looks_like_snapshot, parse_snapshot
from doctor.postmortem.nvidia_smi.printout import looks_like_nvidia_smi, read_nvidia_smi
from doctor.postmortem.ras.events import looks_like_ras, read_ras
from tests.postmortem.allocating import training

DATA = Path(__file__).parents[1] / "data"
SMI = [path.read_text() for path in sorted((DATA / "nvidia_smi").glob("*.txt"))]
RAS = [path.read_text() for path in sorted((DATA / "ras").iterdir())]
SNAPSHOT = training(steps=2).snapshot()
PICKLES = [pickle.dumps(SNAPSHOT, protocol) for protocol in (2, 4)]


def attempt(read, *arguments, **named):
    """What was read, or the sentence that says why nothing was."""
    try:
        return read(*arguments, **named), None
    except UnusableError as error:
        return None, str(error)


quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def mutated(draw, samples):
    """A sample of which parts were cut out, repeated, or replaced by junk."""
    text = draw(st.sampled_from(samples))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 300)))
        junk = draw(st.sampled_from([text[start:end] * 2, text[:0]]) | _junk(text))
        text = text[:start] + junk + text[end:]
    return text


def _junk(text):
    return st.binary(max_size=40) if isinstance(text, bytes) else st.text(max_size=40)


@quick
@given(mutated(SMI) | st.text(max_size=300))
def test_any_output_of_nvidia_smi(text):
    looks_like_nvidia_smi(text)
    for section in read_nvidia_smi(text.splitlines(), "smi.txt"):
        msgspec.json.encode(in_unicode(section))


@quick
@given(mutated(RAS) | st.text(max_size=300))
def test_any_answer_of_ras(text):
    looks_like_ras(text)
    for event in read_ras(text, "ras.txt"):
        msgspec.json.encode(in_unicode(event))


@quick
@given(mutated(PICKLES) | st.binary(max_size=300))
def test_any_pickle(data):
    looks_like_snapshot(data)
    found, why = attempt(load_plain, data, limit=1 << 20)
    facts, why = attempt(parse_snapshot, found) if why is None else (None, why)
    assert why is None or (why.isprintable() and len(why) < 300)
    if facts is not None:
        msgspec.json.encode(in_unicode(facts))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = ["segments", "device_traces", "blocks", "frames", "history", "size", "state", "addr", "action", "time_us"]
KEYS += ["total_size", "device", "allocator_settings", "filename", "line", "name", "segment_pool_id", "device_free"]


@st.composite
def garbled(draw, value):
    """The value with some of its parts replaced by anything."""
    if draw(st.integers(0, 12)) == 0:
        return draw(PLAIN)
    if isinstance(value, dict):
        return {key: draw(garbled(inner)) for key, inner in value.items()}
    if isinstance(value, list):
        return [draw(garbled(inner)) for inner in value[:3]]
    return value


@quick
@given(garbled(SNAPSHOT) | st.fixed_dictionaries({"segments": PLAIN, "device_traces": PLAIN}) | PLAIN)
def test_any_plain_values_as_a_snapshot(found):
    facts, why = attempt(parse_snapshot, found)
    assert why is None or "no memory snapshot" in why
    if facts is not None:
        msgspec.json.encode(in_unicode(facts))


class Bad:
    def __reduce__(self):
        return (exec, ("raise SystemExit('it ran')",))


HOSTILE = {
    "reduce": pickle.dumps(Bad(), 4),
    "in a snapshot": pickle.dumps({**SNAPSHOT, "external_annotations": [Bad()]}, 4),
    "old global": b"cos\nsystem\n(S'true'\ntR.",
    "inst": b"(S'true'\nios\nsystem\n.",
    "stacked": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    "new object": b"\x80\x02cbuiltins\nobject\n)\x81.",
    "a name with escapes": b"\x80\x02c\x1b[31mos\nsys\rtem\n.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_named(name):
    for source in (HOSTILE[name], io.BytesIO(HOSTILE[name])):
        with pytest.raises(UnusableError, match="wants to import") as refused:
            load_plain(source, limit=1 << 20)
        assert str(refused.value).isprintable()


def test_extensions_of_this_interpreter_are_refused():
    copyreg.add_extension("os", "system", 240)
    try:
        for _ in range(2):
            with pytest.raises(UnusableError, match=r"wants to import os\.system"):
                load_plain(b"\x80\x02\x82\xf0(S'true'\ntR.", limit=100)
    finally:
        copyreg.remove_extension("os", "system", 240)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02P7\n.",
        b"\x80\x02}(K\x01K\x02b.",
        b"\x80\x02]K\x01a(e",
        b"\x80\x02(((((t.",
        b"\x80\x04\x8a\xff" + b"\xff" * 255,
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02}]K\x01s.",
        b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    ],
)
def test_pickles_that_lie(data):
    _, why = attempt(load_plain, data, limit=1 << 20)
    assert why is None or why.isprintable()
