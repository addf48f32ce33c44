"""The roll: who came, who is on the way, and what of it can't be read."""

import random

import msgspec
import pytest

from doctor.cluster.gather.member_table import MemberTable
from doctor.cluster.gather.probe_schedule import probe_addresses
from doctor.cluster.gather.protocol import MemberFacts, ProbeResult
from doctor.cluster.membership.protocol import JoinRequest, LeaderAnnouncement
from doctor.cluster.transport.codec import encode, pack_member
from doctor.core.facts import SECTIONS, Reach
from doctor.core.job import LastSeen, Member, build_job
from doctor.facts import HostFacts, LaunchFacts, Missing, ReachFacts
from doctor.testing import healthy
from tests.cluster.boards import folder_boards

WORLD = 4
MEMBERS = healthy(hosts=2, per_host=2).members


def identity(member):
    host = member.sections[HostFacts.key]
    return host.boot_id, host.machine_id, host.hostname


def token(number):
    return f"{number:016x}"


def facts_of(number, *, speaks=True, **more):
    """The facts of a rank; who does not speak for its host brings nothing of the host."""
    member = MEMBERS[number]
    sections = {key: value for key, value in member.sections.items() if speaks or SECTIONS[key].level == "rank"}
    capture = pack_member(Member(number, sections, identity(member)))
    return MemberFacts(token(number), number, f"node{number // 2}", capture, **more)


@pytest.fixture
def board(tmp_path):
    return folder_boards(tmp_path)()


@pytest.fixture
def roll(board):
    return MemberTable(board, "nonce", WORLD)


def hello(board, number, name=None):
    board.append("nonce/hello", encode(JoinRequest(name or token(number), number, f"node{number // 2}")))


def bring(board, *posted):
    for one in posted:
        board.append("nonce/facts", encode(one))


def test_joined_and_missing_ranks(board, roll):
    bring(board, facts_of(2), facts_of(0))
    roll.look()
    assert roll.numbers == {0, 2}
    assert roll.missing == (1, 3)
    assert [arrival.number for arrival in roll.in_order] == [0, 2]
    assert not roll.expected_soon


def test_members_have_the_facts_that_were_sent(board, roll):
    bring(board, *(facts_of(number, speaks=number % 2 == 0) for number in range(WORLD)))
    roll.look()
    job, whole = build_job(roll.members()), build_job(MEMBERS)
    assert [host.name for host in job.hosts] == ["node0", "node1"]
    for brought, known in zip([*job.hosts, *job.ranks], [*whole.hosts, *whole.ranks], strict=True):
        assert {key: brought.sections[key] for key in known.sections} == known.sections


def test_a_rank_with_a_join_request_is_expected(board, roll):
    hello(board, 1)
    roll.look()
    assert roll.expected_soon
    assert roll.last_seen((), {}) == (LastSeen(1, "node0", "joined"),)
    bring(board, facts_of(1))
    roll.look()
    assert not roll.expected_soon
    assert roll.last_seen((), {}) == ()


def test_a_duplicate_that_was_seen_is_expected(board, roll):
    bring(board, facts_of(1, duplicates=1))
    roll.look()
    assert roll.expected_soon
    twin = facts_of(1)
    bring(board, msgspec.structs.replace(twin, token=token(99)))
    roll.look()
    assert not roll.expected_soon
    assert [arrival.token for arrival in roll.in_order] == [token(1), token(99)]
    assert [member.rank for member in roll.members()] == [1, 1]


def test_one_process_leads_each_host(board, roll):
    bring(board, *(facts_of(number, port=4000 + number, word="word") for number in (1, 2, 3)), facts_of(0))
    roll.look()
    posts = probe_addresses(build_job(roll.members()), roll.in_order, {})
    assert [post.number for post in posts if post.speaks] == [1, 2]


def test_a_host_whose_leading_process_never_joined(board, roll):
    bring(board, facts_of(0), facts_of(3, speaks=False))
    roll.look()
    first, last = roll.members()
    assert isinstance(first.sections[HostFacts.key], HostFacts)
    assert isinstance(last.sections[HostFacts.key], Missing)
    assert "stopped responding" in last.sections[HostFacts.key].reason


def test_probe_results_are_merged(board, roll):
    reach = [ReachFacts(attempts=(Reach("node1", f"10.0.0.{number}", 1, "open", "peer"),)) for number in range(2)]
    bring(board, facts_of(0, port=1, word=""))
    roll.look()
    [arrival] = roll.in_order
    roll._members[arrival.token] = with_section(roll._members[arrival.token], reach[0])
    assert roll.last_seen([arrival], {}) == (LastSeen(0, "node0", "answered"),)
    measured = ProbeResult(token(0), 0, pack_member(with_section(Member(0, {}, identity(MEMBERS[0])), reach[1])))
    board.append("nonce/measured", encode(measured))
    roll.look()
    assert roll.last_seen([arrival], {}) == ()
    [member] = roll.members()
    assert member.sections[ReachFacts.key].attempts == (*reach[0].attempts, *reach[1].attempts)
    assert isinstance(member.sections[LaunchFacts.key], LaunchFacts)


def with_section(member, section):
    return member._replace(sections={**member.sections, section.key: section})


@pytest.mark.parametrize(
    ("box", "data"),
    [
        ("hello", b""),
        ("hello", b"\xff\xfe"),
        ("hello", encode(ProbeResult(token(1), 1, b""))),
        ("facts", encode(MemberFacts(token(1), 1, "node0", b"no zlib"))),
        ("facts", encode(JoinRequest(token(1), 1, "node0"))),
        ("measured", encode(ProbeResult(token(1), 1, b""))),
    ],
)
def test_damaged_messages_are_noted_and_hide_no_rank(board, roll, box, data):
    board.append(f"nonce/{box}", data)
    bring(board, facts_of(0))
    roll.look()
    assert len(roll.damaged) == 1
    assert roll.numbers == {0}
    assert roll.missing == (1, 2, 3)
    assert roll.last_seen((), {}) == ()


def test_a_rank_outside_the_world_size_is_kept_for_the_checks(board, roll):
    bring(board, facts_of(0), MemberFacts(token(9), 9, "node0", facts_of(1).capture))
    hello(board, 7)
    roll.look()
    assert [member.rank for member in roll.members()] == [0, 9]
    assert roll.missing == (1, 2, 3)
    assert roll.damaged == []


def test_any_bytes_in_any_mailbox(board, roll):
    chance = random.Random(3)
    whole = encode(facts_of(1))
    for box in ("hello", "facts", "measured"):
        for _ in range(60):
            damaged = bytearray(whole)
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
            board.append(f"nonce/{box}", chance.choice([bytes(damaged), chance.randbytes(chance.randrange(50))]))
    bring(board, facts_of(0))
    roll.look()
    assert 0 in roll.numbers
    build_job(roll.members(), world_size=WORLD, last_seen=roll.last_seen((), {}))


def test_join_requests_of_an_earlier_gather(board):
    hello(board, 0)
    hello(board, 1)
    later = MemberTable(board, "later", WORLD)
    later.recall(encode(LeaderAnnouncement("nonce", 0, 1.0)))
    board.append("later/facts", encode(facts_of(1)))
    later.look()
    assert later.last_seen((), {}) == (LastSeen(0, "node0", "joined"),)


@pytest.mark.parametrize("call", [None, b"", b"ended by nobody"])
def test_an_announcement_without_join_requests(board, call):
    later = MemberTable(board, "later", WORLD)
    later.recall(call)
    assert later.last_seen((), {}) == ()
