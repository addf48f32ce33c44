"""Fixes of rules that name the very loader, sampler or option of their case."""

from __future__ import annotations

from doctor.api import Script
from doctor.lint.engine.registry import builtin_rules
from doctor.lint.launch.file_type import read_launch_file
from tests.lab.cases import each_case


def texts_of(id_, case_name, *replaced):
    for rule in builtin_rules():
        for case in rule.cases() if rule.id == id_ else ():
            if case.title == case_name:
                is_script = case.name.endswith(".py")
                text = case.text.replace(*replaced) if replaced else case.text
                file = Script(case.name, text, processors=8) if is_script else read_launch_file(case.name, case.text)
                return [f"{one.summary} | {one.fix}" for one in rule.violations(file)]
    raise AssertionError(case_name)


@each_case(
    ("id_", "case", "text"),
    [
        ("CODE001", "the file is saved with the state of an optimizer", "onto the GPU it was saved from | "),
        ("CODE005", "the loop does not hide the rank", "Call `dist.new_group([local_rank, column * 4 + row])` on all"),
        ("CODE007", "learning rates that follow a rank's own loss", "Average `validate(model, val_loader)` over all"),
        ("CODE008", "a barrier when the time is up", "`elapsed > limit` as a tensor over all ranks (`dist.all_reduce("),
        ("CODE008", "only ranks that selected something gather", "op=dist.ReduceOp.MAX)`), and branch on the result."),
        (
            "CODE008",
            "the backward pass where something is labeled",
            "MIN)`), and make the call only if it holds on all",
        ),
        ("CODE008", "a reduction where the loss is finite", "MIN)`), and make the call only if it holds on all"),
        ("CODE010", "a method makes loader and sampler", "call `batches.sampler.set_epoch(epoch)` at the start"),
        ("CODE010", "FSDP, in functions", "Loader of get_train_loader (line "),
        ("CODE010", "FSDP, in functions", "instead of `True` (shuffle), and call `loader.sampler.set_epoch(epoch)`"),
        ("CODE010", "plain DDP with a shuffling loader", "instead of `shuffle=True`"),
        ("CODE011", "made in a branch, where no line fits all", "Rename `_` in line "),
        (
            "CODE011",
            "made in a branch, where no line fits all",
            "`if isinstance(sampler, DistributedSampler): sampler.set_epoch(epoch)`",
        ),
        ("CODE013", "workers that all read the file", "yield only the samples of this worker"),
        ("CODE022", "the strategy as accelerator", "was removed in 1.7.0 and 2.0.0, and no release is pinned | "),
        ("CODE024", "an option whose default is too many", "Pass `--workers 7`, or change the default in line 5."),
        ("CODE028", "a callback of one's own", "Remove the call from on_exception"),
        ("CODE029", "a download on each of several hosts", "on one rank per file system (rank 0 if"),
        ("CODE029", "a download in a hook of each rank", "(per job with `self.prepare_data_per_node = False`, for a"),
        ("CODE038", "in a function that is given the engine", "Call `model.backward(out.loss)` instead of"),
        ("CODE038", "an old release", "Call `engine.backward(loss)` instead of `(loss / 4).backward()`"),
        ("ENV001", "a comment after a backslash ends the command", "what follows the backslash of line 4: the command"),
        ("ENV006", "accelerate", "Use `--main_process_ip a` in the command of host 1."),
        ("ENV006", "another port on the second host", "Use `--master-port 29500` in the command of host 1."),
    ],
)
def test_a_fix_names_what_its_case_has(id_, case, text):
    (found,) = texts_of(id_, case)
    assert text in found


def test_a_title_marks_the_condition():
    first, *_ = texts_of("CODE008", "a list of what was found in its own batches")
    assert first.startswith("dist.barrier runs only if `bad` is true (line 12), which depends on local data")


def test_a_state_is_gathered_only_from_shards():
    (rule,) = [rule for rule in builtin_rules() if rule.id == "CODE005"]
    (case,) = [case for case in rule.cases() if case.title == "a state that may be sharded, of Accelerate"]
    effects = [one.effect for one in rule.violations(Script(case.name, case.text, processors=8))]
    assert effects
    assert all(one.startswith("If the model is sharded (FSDP, DeepSpeed ZeRO-3), ") for one in effects)


def test_the_line_that_uses_an_average_is_evidence():
    (rule,) = [rule for rule in builtin_rules() if rule.id == "CODE036"]
    case = next(case for case in rule.cases() if case.title == "all ranks sample with it")
    (found,) = rule.violations(Script(case.name, case.text, processors=8))
    assert dict(found.evidence)["used"] == f"`sample_images(ema, rank)` (line {found.place.line + 1})"


def test_the_inner_model_is_no_way_out_of_a_function_that_also_gathers():
    case = "the forward pass of a wrapped model, in a function that rank 0 calls"
    assert "or pass it the inner model" in texts_of("CODE005", case)[0]
    gathers = texts_of("CODE005", case, "    net.eval()\n", "    net.eval()\n    dist.barrier()\n")
    assert any("Call `evaluate` on all ranks" in one for one in gathers)
    assert not any("inner model:" in one for one in gathers)


def test_a_sampler_that_may_be_another_one_is_asked_first():
    (found,) = texts_of("CODE011", "made in a branch, where no line fits all", "for _ in", "for epoch in")
    assert "Start the loop at line 12 with `if isinstance(sampler, DistributedSampler): sampler.set_epoch" in found
