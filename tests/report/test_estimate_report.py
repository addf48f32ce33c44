import io

import msgspec
import pytest

from doctor.core.check_registry import load_registry
from doctor.core.settings import Settings
from doctor.estimate.data_model import LoaderUse, MeasuredThroughput, MemoryBreakdown, TracedStep, TrainingPlan
from doctor.estimate.device_budget import DeviceBudget
from doctor.estimate.estimator import estimate_of
from doctor.estimate.evaluation import report_of
from doctor.report.estimate.markdown import render_estimate_markdown
from doctor.report.estimate.terminal import draw_estimate
from doctor.report.estimate.wording import conclusion, github_notice, part_rows
from doctor.report.machine_formats import render_github, render_json, render_junit
from doctor.report.terminal import make_console

MIB, GIB = 1 << 20, 1 << 30
OFFER = DeviceBudget(memory=80 * GIB, name="H100 80GB", capability="9.0")


def traced(plan):
    batch = plan.batch_size or 16
    parts = MemoryBreakdown(
        parameters=4 * GIB,
        gradients=4 * GIB,
        optimizer=8 * GIB,
        activations=batch * (200 if plan.checkpointing else 700) * MIB,
    )
    return TracedStep(
        plan=plan,
        parts=parts,
        moment="backward",
        reserved=parts.total + 300 * MIB,
        batch_size=batch,
        parameter_count=1_300_000_000,
        parameter_bytes=4 * GIB,
        trainable_count=1_300_000_000,
        batch_bytes=MIB,
    )


def answered(plan=None, offer=OFFER, **changes):
    estimate = estimate_of(
        traced, LoaderUse(workers=2), plan or TrainingPlan(strategy="ddp", devices=8), offer, seconds=99
    )
    estimate = msgspec.structs.replace(estimate, **changes)
    return report_of(estimate, offer, load_registry(plugins=False), Settings(), started=0.0), estimate


def text_of(answer, width=100, **options):
    return draw_estimate(*answer, make_console(io.StringIO(), width=width), **options)


def test_a_search_that_was_cut_short_gives_a_lower_bound():
    report, estimate = answered()
    ways = tuple(msgspec.structs.replace(way, searched=False) for way in estimate.ways)
    cut = msgspec.structs.replace(estimate, ways=ways, searched=False, largest_batch=32)
    text = " ".join(text_of((report, cut)).split())
    assert f">= {ways[0].largest_batch}" in text
    assert "The largest batch that fits is >= 32 samples per rank" in text
    assert ">=" not in text_of((report, estimate))
    alone = msgspec.structs.replace(estimate, searched=None, largest_batch=None, fits=False, sample_bytes=None)
    assert "batch" not in " ".join(text_of((report, alone)).split("\n")[2:4])


def test_the_first_lines_are_the_answer():
    text = text_of(answered())
    first = text.splitlines()[2]
    assert first.startswith("It fits: a rank needs 28.4 GiB of 80 GiB (36 %).")
    assert "The largest batch that fits is" in text
    assert "Each additional sample needs 700 MiB" in " ".join(text.split())
    assert "backward pass" in text


def test_what_does_not_fit_says_by_how_much_and_shows_the_finding():
    text = text_of(answered(TrainingPlan(batch_size=128)))
    flat = " ".join(text.split())
    assert "It does not fit: a rank needs 104 GiB, up to 112 GiB: 31.6 GiB more than the 80 GiB available." in flat
    assert "✗ error   MEM005 predicted-peak-too-large" in text
    assert "activation checkpointing" in text


def test_the_largest_batch_fits_at_the_upper_end_of_its_range_and_the_next_one_does_not():
    _, estimate = answered()
    plan = TrainingPlan(strategy="ddp", devices=8, batch_size=estimate.largest_batch)
    report, largest = answered(plan)
    assert report.verdict == "pass"
    assert largest.fits
    assert largest.high_bytes <= 80 * GIB
    report, larger = answered(msgspec.structs.replace(plan, batch_size=estimate.largest_batch + 1))
    assert report.verdict == "fail"
    assert larger.peak_bytes < 80 * GIB < larger.high_bytes


def test_the_range_and_what_torch_reports_are_told_apart():
    text = " ".join(text_of(answered()).split())
    assert "Peak of a rank: 27.6 GiB to 30.4 GiB, with 26.9 GiB allocated and 27.2 GiB reserved by torch." in text


@pytest.mark.parametrize("width", [40, 60, 72, 100, 160])
def test_no_line_is_wider_than_the_terminal(width):
    plans = (
        TrainingPlan(strategy="ddp", devices=8),
        TrainingPlan(batch_size=128),
        TrainingPlan(ranks_per_device=2, strategy="ddp"),
    )
    for plan in plans:
        text = text_of(answered(plan, measured=MEASURED), width=width)
        assert max(map(len, text.splitlines())) <= width
        assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_the_parts_add_up_to_the_device():
    _, estimate = answered()
    rows = part_rows(estimate)
    assert sum(row.size for row in rows) == 80 * GIB
    assert rows[-1].label == "free"
    assert [row.size for row in rows[:-2]] == sorted((row.size for row in rows[:-2]), reverse=True)


def test_quiet_is_short_and_verbose_tells_of_every_check():
    assert len(text_of(answered(), quiet=True).splitlines()) < 6
    assert "MEM005 predicted-peak-too-large: pass" in text_of(answered(), verbose=True)


def test_what_could_not_be_judged_is_said_with_the_way_to_see_it():
    text = " ".join(text_of(answered(offer=DeviceBudget())).split())
    assert "Not evaluated: GPU007, MEM005: the memory of a device is unknown" in text
    assert "--device" in text


def test_a_bound_is_called_one():
    text = " ".join(text_of(answered(bound="the data decide the shape")).split())
    assert "about 28.4 GiB" in text
    assert "calculated by a rule, not from a traced step: the data decide the shape" in text


def test_names_can_not_steer_the_terminal():
    answer = answered(device_name="\x1b[31mred", notes=("\x1b]0;title\x07",))
    assert "\x1b" not in text_of(answer)


def way(name, ratio, spread, peak=GIB, ranks=1, error=""):
    plan = TrainingPlan(ranks_per_device=ranks)
    return MeasuredThroughput(
        name=name,
        plan=plan,
        ratio=ratio,
        spread=spread,
        peak_bytes=peak,
        samples_per_second=100 * (ratio or 0),
        error=error,
    )


MEASURED = (
    way("one rank", 1.0, 0.0),
    way("2 ranks on one device", 1.1, 0.05, peak=2 * GIB, ranks=2),
    way("one rank, 2 times the batch", 1.6, 0.05, peak=3 * GIB // 2),
    way("one rank, accumulating 2 batches", None, 0.0, error="no time was left for it"),
)


def test_what_follows_from_the_measurements():
    assert conclusion(MEASURED) == (
        "Sharing the device does not pay off: one rank, 2 times the batch is 1.45 times as fast, with 1.5 GiB "
        "instead of 2 GiB."
    )
    text = " ".join(text_of(answered(measured=MEASURED)).split())
    assert "1.60 ± 0.05" in text
    assert "no time was left for it" in text


def test_the_twins_of_that_conclusion():
    noisy = (MEASURED[0], way("2 ranks on one device", 1.5, 0.1, ranks=2), way("one rank, 2 times the batch", 1.6, 0.1))
    assert "gains nothing measurable" in conclusion(noisy)
    on_cpu = [msgspec.structs.replace(one, device="CPU") for one in MEASURED]
    assert conclusion(on_cpu).endswith("Results on a GPU may differ.")
    faster = (MEASURED[0], way("2 ranks on one device", 1.8, 0.05, ranks=2))
    assert conclusion(faster).startswith("Sharing pays off: 2 ranks on one device are 1.80 times")
    assert conclusion((MEASURED[0], way("2 ranks on one device", None, 0.0, ranks=2, error="it failed"))) == ""


def test_markdown_is_a_page_with_tables():
    page = render_estimate_markdown(*answered(TrainingPlan(batch_size=128), measured=MEASURED))
    assert page.startswith("# rankdoctor estimate: fail\n\n**It does not fit")
    assert "| at the peak | size | share |" in page
    assert "| activation checkpointing" in page
    assert "### MEM005 predicted-peak-too-large: error" in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)


def test_programs_get_the_document():
    report, estimate = answered()
    document = msgspec.json.decode(render_json(report))
    assert document["job"] is None
    assert document["schema"] == 1
    assert document["estimate"]["peak_bytes"] == estimate.peak_bytes
    assert document["estimate"]["parts"]["parameters"] == 4 * GIB
    faulty, _ = answered(TrainingPlan(batch_size=128))
    assert "MEM005" in render_junit(faulty)
    assert "::error title=MEM005" in render_github(faulty)
    assert github_notice(estimate).startswith(
        "::notice title=doctor estimate::It fits: a rank needs 28.4 GiB of 80 GiB"
    )
    assert "(36 %25)" in github_notice(estimate)
    timed, _ = answered(measured=MEASURED)
    assert [one["name"] for one in timed.estimate["measured"]] == [one.name for one in MEASURED]
