"""What the watch over an unedited loop tells the monitor: event by event, in one process."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, dataloader

import doctor
from doctor.monitor.autostart import plain_loop, torch_modules
from doctor.monitor.autostart.plain_loop import LoopWatch, open_loop
from doctor.monitor.findings_error import Findings
from doctor.monitor.integrations import torch_state
from doctor.monitor.integrations.adapter import Adapter
from doctor.monitor.integrations.torch_state import TorchRank
from doctor.monitor.telemetry.rank_telemetry import RankTelemetry
from doctor.monitor.watch_session import WatchSession
from tests.integrations.recorded import RecordedSession, found

EPOCH = ("mark", "epoch-end")


@pytest.fixture(autouse=True)
def loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[LoopWatch]:
    """The watch of this process, as if it were one of two ranks; torch is restored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("doctor.monitor.integrations.adapter.WatchSession", RecordedSession)
    monkeypatch.setattr(plain_loop, "START_AFTER", 10_000.0)
    monkeypatch.setattr(plain_loop, "distributed", lambda: True)
    monkeypatch.setattr(plain_loop, "torch_rank", lambda environ: TorchRank(0, 2))
    monkeypatch.setattr(plain_loop.os, "register_at_fork", lambda **functions: None)
    # Another test of this process may have imported it.
    monkeypatch.delitem(sys.modules, plain_loop.TRAINER_MODULE, raising=False)
    monkeypatch.setattr(Adapter, "claimed", False)
    monkeypatch.setattr(Adapter, "stand_in", None)
    monkeypatch.setattr(LoopWatch, "current", None)
    for kind, name in ((DataLoader, "__iter__"), (dataloader._BaseDataLoaderIter, "__next__")):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(optimizers, name, type(getattr(optimizers, name))())
    RecordedSession.made.clear()
    made = open_loop()
    yield made
    made.end()
    for session in RecordedSession.made:
        session.telemetry.close()
    RecordedSession.made.clear()


class Training:
    """A model and its optimizer."""

    def __init__(self, loop: LoopWatch) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        loop.wrapped(self.model)

    def step(self, batch: torch.Tensor) -> None:
        self.model(batch).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def rows(batches: int) -> Any:
    return DataLoader(torch.ones(batches * 2, 1), batch_size=2)


def run() -> RecordedSession:
    (session,) = RecordedSession.made
    return session


STEP = [("mark", "backward"), ("mark", "optimizer"), ("mark", "batch-end")]


def batch(number: int) -> list[tuple[Any, ...]]:
    return [("batch_start", "train", number, 0), *STEP, ("batch_end", "train")]


def epoch(number: int, batches: int = 2) -> list[tuple[Any, ...]]:
    within = [entry for place in range(batches) for entry in batch(place)]
    return [("stage_start", "train"), ("epoch_start", "train", number), *within]


ENDED = [("loader_end", "train", 0, True), ("epoch_end", "train")]


def without_check(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    assert calls[0] == ("open",)
    assert calls.count(("check_start",)) == 1
    return [entry for entry in calls[1:] if entry != ("check_start",)]


def test_epochs_over_one_loader(loop: LoopWatch) -> None:
    training, loader = Training(loop), rows(2)
    for _ in range(2):
        for one in loader:
            training.step(one)
    loop.end()
    calls = run().calls
    assert calls[: calls.index(("check_start",)) + 1] == [
        ("open",),
        ("stage_start", "train"),
        ("epoch_start", "train", 0),
        ("batch_start", "train", 0, 0),
        *STEP,
        ("check_start",),
    ]
    assert without_check(calls) == [*epoch(0), *ENDED, *epoch(1), *ENDED, ("close",)]
    assert run().telemetry.progress.step == 4
    (facts,) = run().telemetry.loaders.facts().loaders
    assert (facts.length, [one.batches for one in facts.epochs]) == (2, [2, 2])


def test_the_same_as_the_loop_that_was_edited(loop: LoopWatch) -> None:
    def records(session: RecordedSession) -> Any:
        telemetry = session.telemetry
        loaders = [(one.stage, one.length, one.epochs) for one in telemetry.loaders.facts().loaders]
        return loaders, telemetry.progress.step, telemetry.replica.model().parameters, telemetry.progress.batch

    training = Training(loop)
    for _ in range(2):
        for one in rows(3):
            training.step(one)
    loop.end()
    training = Training(loop)
    with doctor.watch() as w:
        w.model(training.model)
        for _ in range(2):
            for one in w.loader(rows(3)):
                training.step(one)
                w.step()
    unedited, edited = RecordedSession.made
    assert records(unedited) == records(edited)


def test_evaluations_are_progress_and_nothing_else(loop: LoopWatch) -> None:
    training, loader, validation = Training(loop), rows(2), rows(3)
    for one in loader:
        training.step(one)
        training.model.eval()
        for _ in validation:
            pass
        training.model.train()
        with torch.no_grad():
            for _ in validation:
                break
    loop.end()
    assert [one.stage for one in run().telemetry.loaders.facts().loaders] == ["train"]
    assert run().telemetry.progress.step == 2
    evaluated = [entry for entry in run().calls if entry == ("stage_start", "validate")]
    assert len(evaluated) == 4
    assert run().said("batch_start") == [("batch_start", "train", 0, 0), ("batch_start", "train", 1, 0)]
    assert run().said("loader_end") == [("loader_end", "train", 0, True)]


def test_an_evaluation_with_gradients_before_the_first_step_is_forgotten(loop: LoopWatch) -> None:
    training = Training(loop)
    for _ in rows(5):
        pass
    for one in rows(2):
        training.step(one)
    loop.end()
    (facts,) = run().telemetry.loaders.facts().loaders
    assert (facts.length, [one.batches for one in facts.epochs]) == (2, [2])
    assert run().said("loader_end") == [("loader_end", "train", 0, True)]
    assert run().telemetry.progress.facts().ended[0].batches == 2


def test_another_loader_counts_when_optimizers_step_in_it(loop: LoopWatch) -> None:
    training = Training(loop)
    for one in rows(2):
        training.step(one)
    for _ in rows(4):  # gradients are enabled, and nothing is trained
        pass
    assert len(run().said("batch_start")) == 2
    for place, one in enumerate(rows(6)):
        if place % 2:
            training.step(one)
    loop.end()
    (facts,) = run().telemetry.loaders.facts().loaders
    assert facts.length == 6
    assert [one.batches for one in facts.epochs] == [2, 6]
    assert run().telemetry.progress.step == 5


def test_a_loop_that_is_left_has_not_ended_its_loader(loop: LoopWatch) -> None:
    training, loader = Training(loop), rows(3)
    for _ in range(2):
        for one in loader:
            training.step(one)
            break
    loop.end()
    assert run().said("loader_end") == [("loader_end", "train", 0, False)]
    assert run().telemetry.progress.step == 2


def test_two_loaders_at_once_are_one_batch(loop: LoopWatch) -> None:
    training = Training(loop)
    for one, _ in zip(rows(3), rows(3), strict=True):
        training.step(one)
    loop.end()
    assert len(run().said("batch_start")) == 3
    assert run().telemetry.progress.step == 3


def test_several_optimizers_in_a_batch_are_one_step(loop: LoopWatch) -> None:
    training = Training(loop)
    other = Training(loop)
    for one in rows(3):
        training.step(one)
        other.step(one)
        other.step(one)
    loop.end()
    assert run().telemetry.progress.step == 3
    assert len(run().said("batch_end")) == 3


def test_settings_of_the_optimizers_that_step(loop: LoopWatch) -> None:
    training, other = Training(loop), Training(loop)
    for place, one in enumerate(rows(200)):
        training.step(one)
        other.step(one)
        # Without peers, the samples of fast steps are left out.
        run().telemetry.progress.has_peers = True
        if place == 120:
            training.optimizer.param_groups[0]["lr"] = 0.5
    loop.end()
    rates = [
        {one.name: one.value for one in sample.values if one.name.startswith("lr")}
        for sample in run().telemetry.replica.facts().settings
    ]
    usual = {"lr of optimizer 0": "0.1", "lr of optimizer 1": "0.1"}
    assert usual in rates
    assert rates[-1] == {**usual, "lr of optimizer 0": "0.5"}


def test_accumulated_batches(loop: LoopWatch) -> None:
    training = Training(loop)
    for place, one in enumerate(rows(6)):
        training.model(one).mean().backward()
        if place % 3 == 2:
            training.optimizer.step()
    loop.end()
    assert run().telemetry.progress.step == 2
    assert [one.batches for one in run().telemetry.loaders.facts().loaders[0].epochs] == [6]


def test_without_a_loader_a_batch_is_a_step(loop: LoopWatch) -> None:
    training, other = Training(loop), Training(loop)
    for _ in range(3):
        training.step(torch.ones(2, 1))
        other.step(torch.ones(2, 1))
    loop.end()
    assert run().said("batch_start") == [("batch_start", "train", number, 0) for number in range(3)]
    assert run().telemetry.progress.step == 3
    assert run().telemetry.loaders.facts().loaders == ()


def test_an_optimizer_that_torch_compiled(loop: LoopWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)
    training = Training(loop)
    step = torch.compile(training.optimizer.step, backend="eager")
    for _ in range(2):
        for one in rows(3):
            training.model(one).mean().backward()
            step()
            training.optimizer.zero_grad(set_to_none=False)
    loop.end()
    assert run().telemetry.progress.step == 6
    assert ("mark", "optimizer") not in run().calls
    assert [one.batches for one in run().telemetry.loaders.facts().loaders[0].epochs] == [3, 3]


def test_checkpoints(loop: LoopWatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(torch.serialization, "save", torch.serialization.save)
    monkeypatch.setitem(torch_modules.sys.modules, torch_modules.PLAIN_LOOP, plain_loop)
    torch_modules.watch_checkpoints(torch.serialization)
    training = Training(loop)
    torch.serialization.save({}, tmp_path / "a")  # no run yet
    for one in rows(1):
        training.step(one)
        torch.serialization.save(training.model.state_dict(), tmp_path / "b")
        with pytest.raises(RuntimeError):
            torch.serialization.save({}, tmp_path / "no/folder")
    marks = [entry[1] for entry in run().said("mark")]
    assert marks[3:] == ["checkpoint", "batch-end", "checkpoint", "batch-end"]
    assert (tmp_path / "b").exists()


def test_checkpoints_of_the_users_own_beside_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written in the Trainer's thread, and are none of its own."""
    telemetry, seen = RankTelemetry(), []
    monkeypatch.setattr(WatchSession, "open_sessions", [SimpleNamespace(telemetry=telemetry)])
    monkeypatch.delitem(torch_modules.sys.modules, torch_modules.PLAIN_LOOP, raising=False)
    module = SimpleNamespace(save=lambda: seen.append(telemetry.progress.point))
    torch_modules.watch_checkpoints(module)
    for point in ("epoch-end", "checkpoint"):
        telemetry.mark(point)
        module.save()
        assert telemetry.progress.point == point
    thread = threading.Thread(target=module.save)
    telemetry.mark("epoch-end")
    thread.start()
    thread.join()
    assert seen == ["checkpoint", "checkpoint", "epoch-end"]


def test_threads_that_did_not_wrap_a_model_are_not_watched(loop: LoopWatch) -> None:
    training = Training(loop)

    def work() -> None:
        for one in rows(3):
            training.step(one)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert RecordedSession.made == []


def begun_beside(loop: LoopWatch) -> int:
    """How many runs have begun once a thread that does not train has waited long enough."""
    thread = threading.Thread(target=loop.begin_early)
    thread.start()
    thread.join()
    return len(RecordedSession.made)


def test_a_rank_that_does_not_train_yet_is_watched_beside_its_thread(loop: LoopWatch) -> None:
    training = Training(loop)
    assert begun_beside(loop) == 1
    progress = run().telemetry.progress
    assert (progress.stage, progress.training_thread) == ("setup", threading.get_ident())
    assert progress.native_id == threading.get_native_id()
    assert loop._run is not None
    assert loop._run.wrapper is None
    for one in rows(2):
        training.step(one)
    assert without_check(run().calls)[: len(epoch(0))] == epoch(0)


def test_a_loop_that_starts_while_its_run_begins_misses_no_step(
    loop: LoopWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are numbered from the first one that is seen, and ranks are compared by number."""
    begins, open_session = threading.Event(), RecordedSession.open

    def slow_open(session: RecordedSession) -> None:
        begins.set()
        time.sleep(0.5)
        open_session(session)

    monkeypatch.setattr(RecordedSession, "open", slow_open)
    training = Training(loop)
    thread = threading.Thread(target=loop.begin_beside, args=(threading.get_ident(), threading.get_native_id()))
    thread.start()
    assert begins.wait(10)
    for one in rows(2):
        training.step(one)
    thread.join()
    assert without_check(run().calls)[: len(epoch(0))] == epoch(0)


def test_the_training_waits_once_for_a_run_that_does_not_begin(loop: LoopWatch) -> None:
    training = Training(loop)
    loop._begin_within = 0.2
    with loop._begins:
        started = time.monotonic()
        for one in rows(4):
            training.step(one)
        assert time.monotonic() - started >= 0.2
        assert loop._begin_within == 0.0
    assert not RecordedSession.made


def test_steps_in_the_constructor_of_a_model_are_not_those_of_its_training(loop: LoopWatch) -> None:
    """DeepSpeed's engine steps its optimizer there, while the other ranks may be late."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    thread = threading.Thread(target=loop.begin_beside, args=(threading.get_ident(), threading.get_native_id()))
    thread.start()
    thread.join()
    optimizer.step()
    assert run().calls == [("open",)]
    training = Training(loop)
    for one in rows(2):
        training.step(one)
    assert without_check(run().calls)[: len(epoch(0))] == epoch(0)


def test_a_run_that_began_early_waits_for_the_model_that_trains(loop: LoopWatch) -> None:
    teacher = Training(loop)
    assert begun_beside(loop) == 1
    del teacher
    gc.collect()
    for one in rows(1):
        assert one is not None
    training = Training(loop)
    for one in rows(2):
        training.step(one)
    assert without_check(run().calls)[: len(epoch(0))] == epoch(0)


@pytest.mark.parametrize("reason", ["evaluates", "transformers", "claimed", "trains"])
def test_no_run_begins_early_if(reason: str, loop: LoopWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(loop)
    if reason == "evaluates":
        training.model.eval()
    elif reason == "transformers":
        monkeypatch.setitem(plain_loop.sys.modules, plain_loop.TRAINER_MODULE, SimpleNamespace())
    elif reason == "claimed":
        monkeypatch.setattr(Adapter, "claimed", True)
    else:
        for one in rows(2):
            training.step(one)
    assert begun_beside(loop) == (reason == "trains")


def test_a_run_that_began_early_makes_way(loop: LoopWatch) -> None:
    training = Training(loop)
    assert begun_beside(loop) == 1
    with doctor.watch() as w:
        for one in w.loader(rows(2)):
            training.step(one)
    first, second = RecordedSession.made
    assert first.calls == [("open",), ("close",)]
    assert second.said("mark") == []


@pytest.mark.parametrize("missing", ["model", "group", "ranks"])
def test_no_run_begins_without(missing: str, loop: LoopWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(loop)
    if missing == "model":
        loop._models.clear()
    elif missing == "group":
        monkeypatch.setattr(plain_loop, "distributed", lambda: None)
    else:
        monkeypatch.setattr(plain_loop, "torch_rank", lambda environ: TorchRank(0, 1))
    for one in rows(2):
        training.step(one)
    assert RecordedSession.made == []


def test_a_run_of_the_programs_own_comes_first(loop: LoopWatch) -> None:
    training, loader = Training(loop), rows(2)
    with doctor.watch() as w:
        for one in w.loader(loader):
            training.step(one)
    for one in loader:  # after it, too
        training.step(one)
    (session,) = RecordedSession.made
    assert session.said("mark") == []


def test_torch_is_left_alone_once_something_else_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoopWatch, "current", None)
    opened: list[Any] = []
    monkeypatch.setattr(plain_loop, "open_loop", opened.append)
    monkeypatch.setattr(Adapter, "claimed", True)
    torch_modules._wrapped(torch.nn.Linear(1, 1))
    assert opened == []
    monkeypatch.setattr(Adapter, "claimed", False)
    monkeypatch.setattr(torch_modules, "_failures", [])
    torch_modules._wrapped(torch.nn.Linear(1, 1))
    assert opened == [None]


def test_a_run_under_way_makes_way(loop: LoopWatch) -> None:
    training, loader = Training(loop), rows(2)
    for one in loader:
        training.step(one)
    with doctor.watch() as w:
        for one in w.loader(loader):
            training.step(one)
    first, second = RecordedSession.made
    assert first.calls[-1] == ("close",)
    assert second.said("mark") == []


def test_a_model_that_is_gone_ends_its_run_and_is_not_kept(loop: LoopWatch) -> None:
    for number in range(2):
        training = Training(loop)
        for one in rows(2):
            training.step(one)
        model = plain_loop.weakref.ref(training.model)
        del training
        gc.collect()
        assert model() is None
        assert len(RecordedSession.made) == number + 1
    assert RecordedSession.made[0].calls[-1] == ("close",)


def test_loaders_and_datasets_are_not_kept(loop: LoopWatch) -> None:
    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return torch.ones(1)

    training, dataset = Training(loop), Rows()
    for one in DataLoader(dataset, 2):
        training.step(one)
        break
    del one
    known = plain_loop.weakref.ref(dataset)
    del dataset
    gc.collect()
    assert known() is None


def test_findings_of_the_start_end_the_loop(loop: LoopWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedSession, "check_start", found)
    training = Training(loop)
    (one,) = rows(1)
    with pytest.raises(Findings):
        training.step(one)
    assert run().said("check_start", "close") == []


def test_failures_of_the_doctor_switch_it_off(
    loop: LoopWatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise LookupError("of the doctor")

    for name in ("fetched", "optimizer_ended"):
        monkeypatch.setattr(plain_loop.LoopRun, name, broken)
    training = Training(loop)
    for one in rows(6):
        training.step(one)
    errors = capsys.readouterr().err
    assert errors.count("disabled after 3 failures") == 1
    assert "LookupError: of the doctor" in errors


def test_nothing_that_is_odd_reaches_the_program(
    loop: LoopWatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "_passes", None)  # an iterator without weak references
    training = Training(loop)
    for one in rows(6):
        training.step(one)
    assert capsys.readouterr().err.count("disabled after 3 failures") == 1


def test_a_forked_process_leaves_the_run_alone(loop: LoopWatch) -> None:
    training, loader = Training(loop), rows(2)
    for one in loader:
        training.step(one)
    before, kept = list(run().calls), loop._run
    loop.forget()
    for one in loader:
        training.step(one)
    loop.end()
    assert run().calls == before
    loop._run = kept


def test_an_iterator_that_is_asked_by_hand(loop: LoopWatch) -> None:
    training, iterator = Training(loop), iter(rows(2))
    with contextlib.suppress(StopIteration):
        while True:
            training.step(next(iterator))
    loop.end()
    assert run().said("loader_end") == [("loader_end", "train", 0, True)]
    assert run().telemetry.progress.step == 2


class DeepSpeedEngine(torch.nn.Module):
    """As deepspeed/runtime/engine.py calls itself: steps after two batches, with an optimizer for each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(1, 1)
        self.optimizers = [torch.optim.SGD([one], 0.1) for one in self.module.parameters()]
        self.micro_steps = self.global_steps = 0

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        self.module.train(mode)
        return self

    def forward(self, batch: torch.Tensor) -> Any:
        return self.module(batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % 2 == 0:
            self._take_model_step()

    def _take_model_step(self) -> None:
        for one in self.optimizers:
            one.step()
            one.zero_grad()
        self.global_steps += 1

    def save_checkpoint(self, file: Any) -> None:
        for name in ("a", "b"):
            torch.serialization.save(self.module.state_dict(), f"{file}-{name}")

    def zero_optimization_stage(self) -> int:
        return 2


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    kind = type("DeepSpeedEngine", (DeepSpeedEngine,), {})
    torch_modules.watch_deepspeed(SimpleNamespace(DeepSpeedEngine=kind))
    monkeypatch.setattr(torch.serialization, "save", torch_modules._as_checkpoint(torch.serialization.save))
    return kind()


def test_an_engine_steps_where_it_has_accumulated_enough(engine: Any, loop: LoopWatch, tmp_path: Any) -> None:
    for one in rows(6):
        loss = engine(one).mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(tmp_path / "file")
    loop.end()
    assert run().telemetry.progress.step == 3
    run().telemetry.replica.finish()
    assert run().telemetry.replica.facts().losses == 6
    assert [entry[1] for entry in run().said("mark")] == [
        *["backward", "backward", "optimizer", "batch-end"] * 3, "checkpoint", "batch-end",
    ]  # fmt: skip
    training = run().telemetry.training
    assert training.strategy == "deepspeed_stage_2"
    assert run().telemetry.replica.model().replicated is True


def test_an_engine_without_loader_has_a_batch_for_each_step(engine: Any, loop: LoopWatch) -> None:
    for _ in range(6):
        engine.backward(engine(torch.ones(1, 1)).mean())
        engine.step()
    loop.end()
    assert run().telemetry.progress.step == 3
    assert len(run().said("batch_start")) == 3


def test_batches_of_an_engine_that_evaluates_do_not_train(engine: Any, loop: LoopWatch) -> None:
    for one in rows(2):
        engine.backward(engine(one).mean())
        engine.step()
    engine.eval()
    for _ in rows(3):
        pass
    loop.end()
    assert len(run().said("batch_start")) == 2
    assert run().said("stage_start") == [("stage_start", "train"), ("stage_start", "validate")]


def test_an_engine_that_fails_in_its_step_is_listened_to_afterwards(engine: Any, loop: LoopWatch) -> None:
    step, engine.optimizers[0].step = engine.optimizers[0].step, lambda: 1 / 0
    for number, one in enumerate(rows(6)):
        engine.backward(engine(one).mean())
        if number == 2:
            engine.optimizers[0].step = step
        with contextlib.suppress(ZeroDivisionError):
            engine.step()
    loop.end()
    assert run().telemetry.progress.step == 2


def test_an_engine_that_its_program_watches_counts_its_own_steps(engine: Any, loop: LoopWatch) -> None:
    with doctor.watch() as w:
        w.model(engine)
        for one in w.loader(rows(6)):
            loss = engine(one).mean()
            engine.backward(loss)
            engine.step()
            w.step(loss=loss)
    assert run().telemetry.progress.step == 3
    assert run().telemetry.replica.facts().losses == 6


class MegatronDDP(torch.nn.Module):
    """The attributes of Megatron-LM's wrapper, whose list of gradient buffers hides the method of a module."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.module = torch.nn.Linear(1, 1)
        self.dp_group = self.dp_cp_group = SimpleNamespace(size=lambda: ranks)
        self.ddp_config = SimpleNamespace(overlap_param_gather=False)
        self.buffers = [torch.zeros(1)]  # type: ignore[assignment]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(batch)
        return result


@pytest.fixture
def megatron(loop: LoopWatch, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Training]:
    """Training with Megatron-LM's wrapper in a job of two ranks, so many of which are one data-parallel group."""
    module = {"__module__": f"{torch_state.MEGATRON}distributed_data_parallel"}
    kind = type("DistributedDataParallel", (MegatronDDP,), module)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)

    def make(ranks: int) -> Training:
        training = Training(loop)
        training.model = kind(ranks)
        training.optimizer = torch.optim.SGD(training.model.parameters(), 0.1)
        loop._models.clear()
        loop.wrapped(training.model)
        return training

    return make


def test_loaders_of_megatron_count_where_every_rank_has_one(
    megatron: Callable[[int], Training], loop: LoopWatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = megatron(2)
    for one in rows(4):
        training.step(one)
    loop.end()
    assert without_check(run().calls) == [*epoch(0, 4), *ENDED, ("close",)]
    assert capsys.readouterr().err == ""


def test_a_loader_of_megatron_is_not_progress_where_other_ranks_have_none(
    megatron: Callable[[int], Training], loop: LoopWatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tensor-parallel rank has the same points and the same number of batches with a loader and without one."""
    training, ones = megatron(1), torch.ones(2, 1)
    assert loop.is_watching()  # a pass over a loader begins the run, else the first step
    for _ in range(4):
        training.step(ones)
    loop.end()
    training, loader = megatron(1), rows(2)
    for _ in range(2):
        for one in loader:
            training.step(one)
        training.model.eval()
        for one in rows(3):
            assert one is not None
        training.model.train()
    loop.end()
    without, with_loader = RecordedSession.made
    assert with_loader.calls == without.calls
    assert len(with_loader.said("batch_start")) == 4
    assert without.telemetry.loaders.facts().loaders == ()
    (facts,) = with_loader.telemetry.loaders.facts().loaders
    assert (facts.stage, facts.length) == ("train", 2)
    assert [(one.epoch, one.batches, one.ended) for one in facts.epochs] == [(0, 2, True), (1, 2, True)]
    assert capsys.readouterr().err == ""


def test_of_megatron_a_pass_without_a_step_is_forgotten(megatron: Callable[[int], Training], loop: LoopWatch) -> None:
    training = megatron(1)
    for one in rows(5):  # an evaluation with gradients
        assert one is not None
    for one in rows(2):
        training.step(one)
    loop.end()
    (facts,) = run().telemetry.loaders.facts().loaders
    assert (facts.length, [one.batches for one in facts.epochs]) == (2, [2])


def test_loaders_of_an_older_megatron_are_not_observed(megatron: Callable[[int], Training], loop: LoopWatch) -> None:
    """Its group holds the ranks of a context-parallel group, which read the same samples."""
    training = megatron(2)
    del training.model.dp_cp_group
    for one in rows(2):
        training.step(one)
    loop.end()
    assert run().telemetry.loaders.facts().loaders == ()
    assert len(run().said("batch_start")) == 2


def test_an_exception_that_ray_train_takes_to_its_driver_ends_the_run(loop: LoopWatch) -> None:
    thread_runner = SimpleNamespace(construct_user_exception_with_traceback=lambda error, exclude_frames: str(error))
    torch_modules.watch_ray_workers(thread_runner)
    training = Training(loop)
    for one in rows(1):
        training.step(one)
    assert (
        thread_runner.construct_user_exception_with_traceback(ValueError("of rank 1"), exclude_frames=3) == "of rank 1"
    )
    assert run().calls[-1] == ("fail", "ValueError")
    torch_modules.watch_ray_workers(SimpleNamespace())  # another release
