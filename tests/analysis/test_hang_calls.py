"""What stacks say: call sites, waits, business."""

import pytest

from doctor.analysis.call_sites import (
    is_in_backward,
    local_work_of,
    own_line,
    site_key,
    site_of,
)
from doctor.core.frames import waits_in
from doctor.facts import Collective, Frame
from doctor.testing import package_frame, user_frame
from tests.lab.cases import each_case

C10D = "torch/distributed/distributed_c10d.py"
WRAPPER = package_frame("torch/distributed/c10d_logger.py", 83, "wrapper")
BARRIER = package_frame(C10D, 5349, "barrier")
SYNC = package_frame("lightning/fabric/utilities/distributed.py", 213, "_sync_ddp")
REDUCE = package_frame("lightning/pytorch/strategies/ddp.py", 367, "reduce")
RESULT = package_frame("lightning/pytorch/trainer/connectors/logger_connector/result.py", 248, "compute")
CALL = package_frame("lightning/pytorch/trainer/call.py", 329, "_call_strategy_hook")
LOOP = package_frame("lightning/pytorch/loops/fit_loop.py", 486, "on_advance_end")
BACKWARD = package_frame("torch/autograd/graph.py", 979, "_engine_run_backward")
FIT = user_frame(90, "<module>")


@pytest.mark.parametrize(
    ("operation", "frames", "text"),
    [
        (
            "all_gather",
            (package_frame(C10D, 1, "all_gather"), WRAPPER, user_frame(57)),
            "all_gather at train.py:57 (training_step)",
        ),
        (
            "barrier",
            (BARRIER, WRAPPER, SYNC, REDUCE, RESULT, user_frame(31), CALL, LOOP, FIT),
            "barrier of self.log(..., sync_dist=True), called at train.py:31 (training_step)",
        ),
        (
            "barrier",
            (BARRIER, WRAPPER, SYNC, REDUCE, RESULT, LOOP, CALL, FIT),
            "barrier of self.log(..., sync_dist=True) at the end of the epoch (distributed.py:213)",
        ),
        (
            "all_reduce",
            (BACKWARD, package_frame("lightning/pytorch/core/module.py", 1137, "backward"), CALL, LOOP, FIT),
            "all_reduce in the backward pass (module.py:1137)",
        ),
        (
            "all_reduce",
            (BACKWARD, user_frame(44, "train")),
            "all_reduce in the backward pass, called at train.py:44 (train)",
        ),
        (
            "barrier",
            (BARRIER, package_frame("lightning/pytorch/strategies/ddp.py", 340, "barrier"), user_frame(12, "setup")),
            "barrier of Lightning, called at train.py:12 (setup)",
        ),
        (
            "all_reduce",
            (
                package_frame(C10D, 1, "all_reduce"),
                package_frame("pytorch_lightning/strategies/strategy.py", 1, "reduce_boolean_decision"),
                package_frame("pytorch_lightning/callbacks/early_stopping.py", 238, "_run_early_stopping_check"),
                package_frame("pytorch_lightning/loops/fit_loop.py", 1, "run"),
                FIT,
            ),
            "all_reduce of EarlyStopping (strategy.py:1)",
        ),
        (
            "all_gather",
            (
                package_frame("torch/nn/parallel/distributed.py", 1064, "__init__"),
                Frame("/env/site-packages/doctor/monitor/autostart/torch_modules.py", 227, "constructed"),
                package_frame("accelerate/accelerator.py", 2060, "prepare_model"),
            ),
            "all_gather of the DDP constructor (accelerator.py:2060)",
        ),
        ("all_reduce", (), "all_reduce"),
        ("", (user_frame(3, "prepare"),), "train.py:3 (prepare)"),
    ],
)
def test_call_sites_in_words(operation, frames, text):
    assert site_of(operation, frames).text == text


def test_the_line_that_started_the_run_is_nobodys_call():
    assert own_line((BACKWARD, CALL, LOOP, FIT)) is None
    assert own_line((BACKWARD, FIT, LOOP)) == FIT


@pytest.mark.parametrize(
    ("frames", "condition"),
    [
        ((BARRIER, user_frame(5), user_frame(9, condition="if rank == 0, line 8")), "if rank == 0, line 8"),
        ((BARRIER, package_frame("lightning_utilities/core/rank_zero.py", 41, "wrapped_fn")), "@rank_zero_only"),
        ((BARRIER, user_frame(5)), ""),
    ],
)
def test_conditions_on_the_way(frames, condition):
    assert site_of("", frames).condition == condition


@pytest.mark.parametrize(
    ("stack", "operation"),
    [
        ((BARRIER, WRAPPER, user_frame(5)), "barrier"),
        ((WRAPPER, BARRIER), "barrier"),
        (
            (
                package_frame("torch/_ops.py", 1, "__call__"),
                package_frame("torch/distributed/_functional_collectives.py", 1, "wait_tensor"),
            ),
            "wait_tensor",
        ),
        ((package_frame("torch/_ops.py", 1, "__call__"), user_frame(5)), ""),
        ((user_frame(5), BARRIER), ""),
        ((BACKWARD, user_frame(5)), ""),
        ((), ""),
    ],
)
def test_whether_a_stack_waits(stack, operation):
    assert waits_in(stack) == operation


def test_backward_waits_or_works():
    assert is_in_backward((BACKWARD, user_frame(5)))
    assert not is_in_backward((user_frame(5), BACKWARD))
    assert not is_in_backward(())


@each_case(
    ("stack", "point", "kind", "line"),
    [
        (
            (user_frame(17, "__getitem__"), package_frame("torch/utils/data/_utils/fetch.py", 1, "fetch")),
            "step",
            "loading",
            17,
        ),
        ((user_frame(17, "anything"),), "data", "loading", 17),
        ((), "data", "loading", None),
        ((package_frame("torch/serialization.py", 1, "_save"), user_frame(9)), "step", "saving", 9),
        ((user_frame(9, "save_everything"),), "step", "saving", 9),
        ((user_frame(4, "tokenize_corpus"),), "step", "tokenizing", 4),
        ((Frame("/usr/lib/python3.11/pdb.py", 1, "interaction"), user_frame(4)), "step", "debugger", 4),
        ((package_frame("torch/_inductor/compile_fx.py", 1, "compile"), user_frame(4)), "forward", "compiling", 4),
        ((Frame("/usr/lib/python3.11/subprocess.py", 1, "wait"), user_frame(4)), "step", "child", 4),
        ((package_frame("filelock/_api.py", 1, "acquire"), user_frame(4)), "step", "lock", 4),
        ((user_frame(4, "prepare"),), "setup", "setup", 4),
        ((package_frame("torch/serialization.py", 1, "_load"), user_frame(9)), "step", "reading", 9),
    ],
)
def test_what_a_rank_is_busy_with(stack, point, kind, line):
    work = local_work_of(stack, point)
    assert work.kind == kind
    assert (work.frame.line if work.frame else None) == line


@pytest.mark.parametrize("name", ["token_mixing", "checkpointed_forward", "load_balancing_loss", "saved_tensors"])
def test_names_that_only_sound_like_it(name):
    assert local_work_of((user_frame(58), user_frame(70, name)), "step") is None


def test_a_compiled_model_is_not_being_compiled():
    compiled = package_frame("torch/_dynamo/eval_frame.py", 1, "_fn")
    assert local_work_of((user_frame(58), compiled, user_frame(70)), "forward") is None


def test_a_line_of_the_step_is_not_local_work():
    assert local_work_of((user_frame(58),), "step") is None
    assert local_work_of((), "backward") is None


def test_keys_are_of_the_place_and_not_of_what_is_kept_of_the_stack():
    frames = (BARRIER, WRAPPER, SYNC, REDUCE, RESULT, user_frame(31), CALL, LOOP, FIT)
    whole = Collective("0", 1, "barrier", frames=frames)
    gist = Collective("0", 9, "barrier", frames=(BARRIER, SYNC, REDUCE, RESULT, user_frame(31), CALL, FIT))
    other = Collective("0", 1, "barrier", frames=(BARRIER, SYNC, REDUCE, RESULT, user_frame(32), CALL, FIT))
    assert site_key(whole) == site_key(gist) != site_key(other)
    guarded = Collective("0", 1, "barrier", frames=(user_frame(31, condition="if rank == 0, line 30"),))
    assert site_key(guarded) == site_key(Collective("0", 1, "barrier", frames=(user_frame(31),)))


def test_a_key_does_not_depend_on_the_way_through_the_doctor():
    own = user_frame(31)
    ways = (package_frame("doctor/monitor/integrations/backward_pass.py", line, "time_wait") for line in (107, 110))
    keys = {site_key(Collective("0", 1, "broadcast", frames=(way, own))) for way in ways}
    assert keys == {site_key(Collective("0", 1, "broadcast", frames=(own,)))}
