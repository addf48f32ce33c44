import itertools
import xml.etree.ElementTree as ET

import msgspec
import pytest

from doctor.facts import (
    Event,
    LogEvidence,
    LogFile,
    MemorySample,
    PathFacts,
    PathSample,
    ProgressFacts,
    Reach,
    ReachFacts,
    RunMemoryFacts,
    Transfer,
    TransferFacts,
)
from doctor.report.html.charts import memory_and_pairs
from doctor.report.html.charts.lane_band import columns_of, marks_of
from doctor.report.html.charts.memory_and_pairs import ALL_POINTS, BAND_POINTS, memory_of, pairs_of
from doctor.report.html.charts.rank_timeline import MOST_LANES, MOST_MESSAGES, timeline_of
from doctor.report.html.charts.svg import memory_svg, pairs_svg, period_of, timeline_svg
from doctor.report.narrative import Narrative, narrative_of
from doctor.report.rank_table import rank_rows, used_columns
from doctor.session import examine
from doctor.testing import healthy, running, stalled, user_frame
from doctor.testing.collective_timings import exchanged
from doctor.testing.host_transfers import across, between, touching, transferred
from doctor.testing.stalled_run import with_failure
from doctor.testing.training_run import NOON
from tests.report.pages import HOSTILE, IDLE, logged_job, stalled_job

NOBODY = Narrative(None, (), (), ())


def story(job):
    return narrative_of(examine(job))


def timeline(job):
    return timeline_of(story(job), job)


def said(at, rank, *, line=1, kind="x.y", host=None, text="words"):
    return Event(kind, text, "job.log", line, rank=rank, host=host, at=at)


def with_events(*events, hosts=1, per_host=2, files=()):
    job = healthy(hosts, per_host).job()
    job.evidence = LogEvidence(events=events, files=files)
    return job


def test_a_rank_that_stands_still_does_so_since_its_last_progress():
    lanes = timeline(stalled_job()).lanes
    last = [lane.spans for lane in lanes]
    still = [[span for span in spans if span.kind == "still"] for spans in last]
    assert [len(spans) for spans in still] == [1] * 8
    assert {(spans[0].begin, spans[0].end) for spans in still} == {(NOON - IDLE, NOON)}
    assert all(span.end <= NOON - IDLE for spans in last for span in spans if span.kind in ("work", "data"))


def test_spans_of_a_lane_follow_each_other():
    for lane in timeline(stalled_job()).lanes:
        points = [span for span in lane.spans if span.kind in ("work", "data", "still")]
        assert all(one.end == pytest.approx(other.begin) for one, other in itertools.pairwise(points))


def test_a_call_that_does_not_end_goes_on_to_the_end_of_the_lane():
    lanes = timeline(stalled_job()).lanes
    open_calls = [[span for span in lane.spans if span.kind == "open"] for lane in lanes]
    assert [lane.rank for lane, calls in zip(lanes, open_calls, strict=True) if not calls] == [2]
    assert {calls[0].end for calls in open_calls if calls} == {NOON}
    assert "not completed" in open_calls[0][0].text


def test_the_ranks_to_blame_are_marked_and_the_view_begins_before_it():
    found = timeline(stalled_job())
    assert [lane.rank for lane in found.lanes if lane.blamed] == [2]
    assert found.begin < found.focus < NOON - IDLE


def test_a_failure_that_came_first_is_marked_as_such():
    job = with_failure(stalled(1, 4), (1,), "KeyError", "'label'", user_frame(8, "step"), at=-5.0).job()
    found = timeline(job)
    assert found.first_at == NOON - 5.0
    assert [(lane.rank, mark.text) for lane, mark in found.marks if mark.kind == "first"] == [(1, "KeyError: 'label'")]


def test_lines_that_a_finding_rests_on_are_marked():
    job = logged_job(hostile="")
    events = tuple(msgspec.structs.replace(one, at=1000.0 + number) for number, one in enumerate(job.evidence.events))
    job.evidence = msgspec.structs.replace(job.evidence, events=events)
    marks = timeline(job).marks
    first = [mark for _, mark in marks if mark.kind == "first"]
    assert first[0].place == "job.log:1"
    assert "no socket interface found" in first[0].text


def test_a_log_in_which_one_rank_speaks_is_its_lane():
    file = LogFile("rank0.log", lines=9, first_at=10.0, last_at=50.0, ranks=(0,))
    both = LogFile("all.log", lines=9, first_at=10.0, last_at=90.0, ranks=(0, 1))
    found = timeline(with_events(said(60.0, 1), files=(file, both)))
    assert [(span.begin, span.end, span.kind) for span in found.lanes[0].spans] == [(10.0, 50.0, "log")]
    assert found.lanes[1].spans == ()


def test_what_no_rank_says_has_a_lane_of_its_host():
    found = timeline(with_events(said(1.0, 0), said(2.0, None, host="node0"), said(3.0, None)))
    assert [lane.name for lane in found.lanes] == ["rank 0 · node0", "rank 1 · node0", "node0", "no rank"]
    assert found.lanes[1].last is None
    assert found.lanes[2].last.at == 2.0


def test_without_times_there_is_no_chart():
    assert timeline(healthy(2, 2).job()) is None
    assert timeline(with_events(said(None, 0))) is None
    assert timeline_of(story(healthy().job()), None) is None


def test_times_that_are_no_numbers_are_left_out():
    job = stalled(1, 2).alter(ProgressFacts, ranks=(0,), at=float("nan")).alter(ProgressFacts, ranks=(1,), at=1e300)
    found = timeline(job.job())
    assert [span.kind for span in found.lanes[0].spans if span.kind in ("work", "still")] == []
    assert "nan" not in timeline_svg(found)


def test_many_messages_are_thinned_and_those_of_findings_are_kept():
    events = [said(float(number), 0, line=number + 1) for number in range(500)]
    events[250] = said(250.0, 0, line=251, kind="python.exception", text="ValueError: x")
    marks = timeline(with_events(*events)).lanes[0].marks
    assert len(marks) <= MOST_MESSAGES + 1
    assert [mark.at for mark in marks if mark.kind != "message"] == [250.0]
    assert {0.0, 499.0} <= {mark.at for mark in marks}


def test_of_many_ranks_those_to_blame_are_drawn():
    job = with_failure(stalled(32, 8), (201,), "KeyError", "'label'", user_frame(8, "step"), at=-5.0).job()
    found = timeline(job)
    assert len(found.lanes) <= MOST_LANES
    assert len(found.lanes) + len(found.others) == 256
    assert 201 in {lane.rank for lane in found.lanes}
    assert [lane.rank for lane in found.lanes] == sorted(lane.rank for lane in found.lanes)


def test_the_other_lanes_are_a_band_that_shows_how_many_did_what():
    found = timeline(stalled_job(8, 8))
    columns = columns_of(found)
    assert len(found.others) == 64 - len(found.lanes)
    assert columns[-1].shares["still"] == pytest.approx(1)
    assert columns[-1].shares["open"] == pytest.approx(1)
    middle = [column for column in columns if found.focus < column.begin and column.end < NOON - IDLE]
    assert all(
        sum(column.shares[kind] for kind in ("work", "data") if kind in column.shares) > 0.99 for column in middle
    )
    spent = sum(span.end - span.begin for lane in found.others for span in lane.spans if span.kind == "data")
    drawn = sum(column.shares.get("data", 0) * (column.end - column.begin) for column in columns)
    assert drawn * len(found.others) == pytest.approx(spent)
    shapes = shapes_of(timeline_svg(found))
    assert f"no progress: at most {len(found.others)} of {len(found.others)} at once" in [title for *_, title in shapes]


def test_marks_of_the_other_lanes_are_counted_by_column():
    events = [said(100.0, rank, line=rank + 1, kind="python.exception", text=f"E{rank}") for rank in range(40)]
    found = timeline(with_events(said(0.0, 0, line=99), *events, per_host=40))
    ((mark, many),) = [one for one in marks_of(found) if one[0].kind == "error"]
    assert (mark.at, many) == (100.0, len(found.others))
    assert f"and {many - 1} more at this time" in timeline_svg(found)


def test_ranks_that_ended_alike_share_a_row_of_the_last_activities():
    first, second = timeline(stalled_job(8, 8)).activities
    assert (first.name, first.blamed) == ("rank 21 · node2", True)
    assert (second.name, second.began) == ("ranks 0-20,22-63", (NOON - IDLE, NOON - IDLE))


def test_memory_of_many_ranks_is_a_band():
    job = stalled_job(8, 8)
    chart = memory_of(story(job), job)[0]
    assert [(line.rank, line.blamed) for line in chart.lines if line.blamed] == [(21, True)]
    assert len(chart.lines) + chart.others == 64
    assert len(chart.band) <= BAND_POINTS
    assert all(one.lowest <= one.median <= one.highest for one in chart.band)
    others = [rank for rank in job.ranks if rank.number not in {line.rank for line in chart.lines}]
    highest = max(sample.reserved for rank in others for sample in rank.find(RunMemoryFacts).samples)
    assert max(one.highest for one in chart.band) == highest
    assert [row.name.partition(", ")[2] for row in chart.rows[-3:]] == ["lowest", "median", "highest"]
    assert chart.rows[-1].highest == highest
    assert [tag for tag, css, *_ in shapes_of(memory_svg(chart)) if css == "spread"] == ["polygon"]


def shapes_of(drawing):
    """The shapes of a drawing: tag, class, attributes and title of each. A drawing that is not well formed raises."""
    root = ET.fromstring(drawing)
    return [(one.tag, one.get("class", ""), one.attrib, one.findtext("title", "")) for one in root.iter()]


def percent(text):
    return float(text.removesuffix("%"))


def test_the_drawing_has_each_span_where_it_was():
    found = timeline(stalled_job())
    shapes = shapes_of(timeline_svg(found))
    spans = [(css, attributes, title) for tag, css, attributes, title in shapes if tag == "rect"]
    assert len(spans) == sum(len(lane.spans) for lane in found.lanes)
    assert {css for css, _, _ in spans} == {"s-work", "s-data", "s-call", "s-open", "s-still"}
    assert min(percent(attributes["x"]) for _, attributes, _ in spans) == pytest.approx(1, abs=1)
    ends = [percent(attributes["x"]) + percent(attributes["width"]) for _, attributes, _ in spans]
    assert max(ends) == pytest.approx(99, abs=1)
    assert sum("no progress: stalled for 12 s" in title for _, _, title in spans) == 8


def test_the_part_that_is_shown_first_begins_at_the_fault():
    found = timeline(stalled_job())
    period = period_of(found)
    assert period.share(found.end - found.begin) == pytest.approx(99, abs=1)
    assert 1 < period.zoom < 3
    assert period.begin < period.focus < found.end - found.begin
    grids = [attributes["data-view"] for tag, _, attributes, _ in shapes_of(timeline_svg(found)) if tag == "g"]
    assert grids == ["all", "focus"]


def test_a_drawing_of_many_lanes_has_a_path_for_each_kind():
    shapes = shapes_of(timeline_svg(timeline(stalled_job(4, 8))))
    assert {css for tag, css, _, _ in shapes if tag == "rect"} == {"s-open", "s-still"}
    paths = {css: attributes["d"] for tag, css, attributes, _ in shapes if tag == "path" and css != "grid"}
    assert set(paths) == {"s-work", "s-data", "s-call"}
    assert paths["s-work"].count("M") > 32


def test_texts_of_a_drawing_are_escaped():
    job = with_events(said(1.0, 0, kind="python.exception", text=HOSTILE))
    drawing = timeline_svg(timeline(job))
    assert "&lt;script&gt;" in drawing
    assert {tag for tag, _, _, _ in shapes_of(drawing)} <= {"svg", "g", "line", "text", "path", "rect", "title"}


def test_memory_is_drawn_for_each_measure_and_thinned_at_its_peaks():
    samples = tuple(MemorySample(step, reserved=(7 if step == 1234 else 1) << 30) for step in range(5000))
    job = running(1, 4).alter(RunMemoryFacts, samples=samples).job()
    (chart,) = memory_of(story(job), job)
    lines = [(attributes, title) for tag, _, attributes, title in shapes_of(memory_svg(chart)) if tag == "polyline"]
    assert [title for _, title in lines] == [f"rank {n}: highest 7 GiB at step 1234, last 1 GiB" for n in range(4)]
    assert all(len(attributes["points"].split()) == 2 * len(chart.lines[0].points) for attributes, _ in lines)
    assert (chart.field, chart.limit) == ("reserved", 80 << 30)
    assert all(line.highest == (1234, 7 << 30) for line in chart.lines)
    assert sum(len(line.points) for line in chart.lines) <= ALL_POINTS
    assert all(line.points[-1][0] == 4999 for line in chart.lines)


def test_ranks_of_findings_about_memory_stand_out():
    job = stalled_job()
    charts_of_job = memory_of(story(job), job)
    assert [chart.field for chart in charts_of_job] == ["reserved", "allocated", "resident"]
    assert all([line.rank for line in chart.lines if line.blamed] == [2] for chart in charts_of_job)
    assert charts_of_job[-1].limit is None


def test_without_samples_there_is_no_memory_chart():
    job = running().alter(RunMemoryFacts, samples=()).job()
    assert memory_of(story(job), job) == ()
    assert memory_of(story(job), None) == ()


def test_pairs_show_the_worst_connection_of_two_hosts():
    tried = ReachFacts(
        attempts=(Reach("node1", "10.0.0.2", 29500, "open"), Reach("node1", "10.0.0.2", 29501, "silent"))
    )
    job = healthy(2, 2).put(tried, ranks=(0,)).job()
    found = pairs_of(NOBODY, job)
    assert found.hosts == ("node0", "node1")
    (chart,) = found.charts
    assert [(pair.source, pair.target, pair.text, pair.bad) for pair in chart.pairs] == [
        ("node0", "node1", "silent, 10.0.0.2:29501", True)
    ]


def test_pairs_show_what_was_measured():
    paths = PathFacts(samples=(PathSample("node1", round_trip=0.0015, full_size_arrived=False),))
    sent = TransferFacts(samples=(Transfer("node1", "done", 2.0**31), Transfer("node1", "done", 2.0**30)))
    job = healthy(2, 1).put(paths, hosts=("node0",)).put(sent, hosts=("node0",)).job()
    charts_of_job = {chart.name: chart for chart in pairs_of(NOBODY, job).charts}
    assert charts_of_job["bandwidth"].pairs[0].text == "1 GiB/s"
    assert charts_of_job["round trip"].pairs[0].text == "1.5 ms"
    assert charts_of_job["full-size packets"].pairs[0].bad
    assert "name lookup" not in charts_of_job


def bad_ways(sketch):
    """Between which hosts the bandwidth is marked as bad."""
    job = sketch.job()
    (bandwidth,) = [chart for chart in pairs_of(story(job), job).charts if chart.name == "bandwidth"]
    return {(pair.source, pair.target) for pair in bandwidth.pairs if pair.bad}


def test_messages_of_ranks_over_the_back_end():
    sketch = exchanged(lambda source, target: 5 in (source, target) and source // 4 != target // 4)
    for host in transferred(4).job().hosts:
        sketch = sketch.put(host.find(TransferFacts), hosts=(host.name,))
    job = sketch.job()
    (chart,) = [chart for chart in pairs_of(story(job), job).charts if chart.name == "messages over nccl"]
    assert {(pair.source, pair.target) for pair in chart.pairs} == {
        *itertools.permutations(("node0", "node1", "node2", "node3"), 2)
    }
    assert {pair.bad for pair in chart.pairs if "node1" not in (pair.source, pair.target)} == {False}
    assert {pair.bad for pair in chart.pairs if "node1" in (pair.source, pair.target)} == {True}


def test_slow_pairs_of_a_host_that_is_blamed_are_bad():
    blamed = bad_ways(transferred(6, touching(3)))
    assert len(blamed) == 10
    assert all("node3" in way for way in blamed)
    assert bad_ways(transferred(6, between(1, 2))) == {("node1", "node2"), ("node2", "node1")}
    assert len(bad_ways(transferred(8, across(range(4))))) == 32


def test_a_slow_pair_that_nobody_is_blamed_for_is_not_bad():
    assert bad_ways(transferred(8)) == set()
    assert bad_ways(transferred(8, lambda *way: way == (1, 2, 0), share=0.3)) == set()


def test_what_is_bad_is_drawn_first():
    job = transferred(6, touching(3)).job()
    assert pairs_of(NOBODY, job).charts[0].name == "round trip"
    assert pairs_of(story(job), job).charts[0].name == "bandwidth"


def test_without_probes_there_are_no_pairs():
    assert pairs_of(NOBODY, healthy(4, 2).job()) is None
    assert pairs_of(NOBODY, None) is None


def test_of_many_hosts_as_many_are_drawn_as_fit(monkeypatch):
    monkeypatch.setattr(memory_and_pairs, "MOST_HOSTS", 3)
    sketch = healthy(5, 1)
    for host in range(5):
        paths = tuple(PathSample(f"node{peer}", round_trip=0.001) for peer in range(5) if peer != host)
        sketch = sketch.put(PathFacts(samples=paths), hosts=(f"node{host}",))
    found = pairs_of(NOBODY, sketch.job())
    assert (found.hosts, found.together) == (("node0 … node1", "node2 … node3", "node4"), 2)
    (chart,) = found.charts
    assert (len(chart.pairs), chart.measured, len(chart.worst)) == (8, 20, 20)
    cells = [css for tag, css, _, _ in shapes_of(pairs_svg(chart, found.hosts)) if tag == "rect"]
    assert len(cells) == 8


def test_a_cell_of_several_hosts_is_their_worst_pair(monkeypatch):
    monkeypatch.setattr(memory_and_pairs, "MOST_HOSTS", 2)
    job = transferred(4, between(1, 2)).job()
    chart = next(one for one in pairs_of(story(job), job).charts if one.name == "bandwidth")
    cells = {(pair.source, pair.target): pair for pair in chart.pairs}
    left, right = pairs_of(story(job), job).hosts
    assert {way for way, pair in cells.items() if pair.bad} == {(left, right), (right, left)}
    slowest = {(pair.source, pair.target): pair.weight for pair in chart.worst}
    assert cells[left, right].weight == slowest["node1", "node2"]


def test_rows_say_where_a_rank_was_and_what_ended_it():
    job = with_failure(stalled(1, 2), (1,), "KeyError", "'label'", user_frame(8, "step")).job()
    report = examine(job)
    first, second = rank_rows(report, job)
    assert first.state.text == "stalled for 12 s, training, backward"
    assert first.collective.text == "all_reduce 140 of the default group, not completed"
    assert first.batch.text == "epoch 1, batch 40, step 140"
    assert second.error.text == "KeyError: 'label'"
    assert report.primary in second.findings
    assert list(used_columns([first, second])) == ["host", "state", "collective", "batch", "error", "memory"]


def test_columns_without_a_value_are_left_out():
    job = healthy(2, 2).job()
    assert list(used_columns(rank_rows(examine(job), job))) == ["host"]


def test_what_a_neighbour_saw_is_said_to_be_that():
    job = running().alter(ProgressFacts, ranks=(1,), state="gone", seen_by=0).job()
    row = rank_rows(examine(job), job)[1]
    assert row.state.text.startswith("gone")
    assert "reported by rank 0" in row.state.text
