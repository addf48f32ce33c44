"""What ranks tell one another: what is written is what is read, and nothing else is."""

import copy
import math
import random
import re
import zlib

import msgspec
import pytest

from doctor.cluster.gather.protocol import TOKEN_PREFIX_BYTES, GatherVerdict, MemberFacts, ProbeResult
from doctor.cluster.membership.protocol import JoinRequest, LeaderAnnouncement
from doctor.cluster.transport.codec import MalformedMessage, decode, encode, pack_member, unpack_capture
from doctor.core import capture
from doctor.core.capture import FILE_LIMIT, DecodedSections, EncodedSections
from doctor.core.facts import Section, Variable
from doctor.facts import EnvironmentFacts
from doctor.testing import healthy

TOKENS = [f"{number * 0x9E3779B97F4A7C15 % (1 << 64):016x}" for number in range(1, 2000)]
MEMBER = healthy(hosts=1, per_host=2).members[1]
MESSAGES = [
    LeaderAnnouncement("0123abcd", 0, 30.0),
    JoinRequest(TOKENS[0], 3, "node0"),
    MemberFacts(TOKENS[0], 3, "node0", b"\0", 1, 4000, "word"),
    ProbeResult(TOKENS[0], 3, b"\0"),
    GatherVerdict.of(1, TOKENS),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_written_is_read(message):
    assert decode(encode(message), type(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_garbage_is_unreadable_and_nothing_worse(message):
    chance = random.Random(7)
    whole = encode(message)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        for data in (bytes(damaged), chance.randbytes(chance.randrange(40)), whole[: chance.randrange(len(whole))]):
            try:
                decode(data, type(message))
            except MalformedMessage:
                continue


def test_a_message_of_another_kind_is_unreadable():
    with pytest.raises(MalformedMessage):
        decode(encode(GatherVerdict(1)), LeaderAnnouncement)
    with pytest.raises(MalformedMessage):
        decode(b"\x91" * 100_000, LeaderAnnouncement)  # lists within lists


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (LeaderAnnouncement, {"nonce": "../../etc/passwd", "number": 0, "seconds": 1.0}),
        (LeaderAnnouncement, {"nonce": "", "number": 0, "seconds": 1.0}),
        (LeaderAnnouncement, {"nonce": "abc\n", "number": 0, "seconds": 1.0}),
        (LeaderAnnouncement, {"nonce": "abc", "number": 0, "seconds": math.nan}),
        (LeaderAnnouncement, {"nonce": "abc", "number": 0, "seconds": math.inf}),
        (LeaderAnnouncement, {"nonce": "abc", "number": 0, "seconds": -1.0}),
        (JoinRequest, {"token": "no token", "number": 0, "host": ""}),
        (JoinRequest, {"token": TOKENS[0], "number": -1, "host": ""}),
        (MemberFacts, {"token": "zz" * 8, "number": 0, "host": "", "capture": b""}),
        (MemberFacts, {"token": TOKENS[0], "number": 0, "host": "", "capture": b"", "duplicates": -1}),
        (MemberFacts, {"token": TOKENS[0], "number": 0, "host": "", "capture": b"", "port": 0}),
        (GatherVerdict, {"code": 256}),
        (GatherVerdict, {"code": -1}),
    ],
)
def test_values_that_no_process_of_ours_would_write(kind, fields):
    with pytest.raises(MalformedMessage):
        decode(msgspec.msgpack.encode(fields), kind)


def test_a_verdict_covers_those_who_were_judged():
    verdict = GatherVerdict.of(0, TOKENS[:1000])
    assert all(verdict.covers(token) for token in TOKENS[:1000])
    assert sum(verdict.covers(token) for token in TOKENS[1000:]) < 3
    assert len(verdict.judged) == 1000 * TOKEN_PREFIX_BYTES


def test_a_verdict_does_not_cover_by_bytes_of_two_neighbours():
    verdict = GatherVerdict.of(0, ["a1a2a3" + "0" * 10, "b1b2b3" + "0" * 10])
    assert verdict.covers("b1b2b3" + "f" * 10)
    assert not verdict.covers("a2a3b1" + "0" * 10)
    assert not GatherVerdict(0).covers(TOKENS[0])


def test_facts_survive_the_round_trip():
    [arrived] = unpack_capture(pack_member(MEMBER), "facts").members
    assert arrived.rank == MEMBER.rank
    assert arrived.sections == MEMBER.sections


def plain(packed):
    """A packed capture without the second at which it was created."""
    return re.sub(rb'"created":"[^"]*"', b"", zlib.decompress(packed))


def test_sections_packed_before_make_no_difference():
    encoded = EncodedSections()
    for value in ("1", "1", "2", "hf_" + "a1B2" * 9):
        sections = {**MEMBER.sections, EnvironmentFacts.key: EnvironmentFacts(variables=(Variable("NCCL_X", value),))}
        member = MEMBER._replace(sections=sections)
        packed = plain(pack_member(member, encoded))
        assert packed == plain(pack_member(member))
        assert (value.encode() in packed) is (len(value) == 1)  # the last one is a secret


def test_equal_sections_are_encoded_once(monkeypatch):
    encoded, searched = EncodedSections(), []
    monkeypatch.setattr(capture, "holds_secret", lambda records: searched.extend(records) or False)
    pack_member(MEMBER, encoded)
    assert searched
    searched.clear()
    changed = EnvironmentFacts(variables=(Variable("NCCL_X", "1"),))
    equal = {key: copy.copy(section) for key, section in MEMBER.sections.items()}
    pack_member(MEMBER._replace(sections={**equal, EnvironmentFacts.key: changed}), encoded)
    assert searched == [changed]


def test_large_facts_survive_the_round_trip():
    many = tuple(Variable(f"NCCL_{number}", "x" * 1000) for number in range(3000))
    member = MEMBER._replace(sections={**MEMBER.sections, EnvironmentFacts.key: EnvironmentFacts(variables=many)})
    [arrived] = unpack_capture(pack_member(member), "facts").members
    assert arrived.sections == member.sections


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no zlib",
        zlib.compress(b""),
        zlib.compress(b"[" * 100_000),
        zlib.compress(b"{}"),
        zlib.compress(b'{"schema": 2, "kind": "capture", "hosts": [], "ranks": []}'),
        zlib.compress(b'{"schema": 1, "kind": "capture", "hosts": [], "ranks": []}'),
        zlib.compress(b'{"schema": 1, "kind": "capture", "created": "\xed\xa0\x80", "hosts": [], "ranks": []}'),
        # The packed capture holds the time, and ids must be the same in all workers.
        pytest.param(pack_member(MEMBER)[:-1], id="the last byte is missing"),
        pytest.param(pack_member(MEMBER)[:100], id="the first bytes alone"),
    ],
)
def test_facts_that_are_damaged(data):
    with pytest.raises(MalformedMessage, match="the facts of rank 3"):
        unpack_capture(data, "the facts of rank 3")


def test_a_bomb_is_not_blown_up():
    bomb = zlib.compress(b" " * (FILE_LIMIT >> 5))
    assert len(bomb) < 1 << 17
    with pytest.raises(MalformedMessage, match="too large"):
        unpack_capture(bomb, "facts")


def test_sections_that_arrive_again_are_not_decoded_again():
    def arrived(member):
        return unpack_capture(pack_member(member), "the facts of rank 1", decoded).members[0].sections

    decoded = DecodedSections()
    before = arrived(MEMBER)
    changed = EnvironmentFacts(variables=(Variable("NCCL_DEBUG", "INFO"),))
    after = arrived(MEMBER._replace(sections={**MEMBER.sections, EnvironmentFacts.key: changed}))
    assert after[EnvironmentFacts.key] == changed
    same = {key for key, one in before.items() if isinstance(one, Section)} - {EnvironmentFacts.key}
    assert same
    assert all(after[key] is before[key] for key in same)
    assert len(decoded.known) <= len(after)  # no more is kept than arrived last
    with pytest.raises(MalformedMessage):
        unpack_capture(b"garbage", "the facts of rank 1", decoded)
    assert arrived(MEMBER) == before
