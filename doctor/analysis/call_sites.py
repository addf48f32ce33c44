"""Call sites from stacks: the call that a rank waits in, its caller, and local work of ranks that do not wait.

Frames are innermost first. Paths are compared by their ends, so that Lightning is found under both of its names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from doctor.core.facts import Collective, Frame
from doctor.core.frames import NATIVE_CODE, NATIVE_WAITS, is_backward_engine, is_doctor, is_torch, waits_in

POINT_TO_POINT = frozenset({"send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv"})
"""Operations between two ranks."""
BACKWARD = "backward"
"""The words of a call in the backward pass."""
_DRIVERS = ("/loops/", "transformers/trainer.py")
"""Loops of a framework: user code outside of them only started the run."""


class Caller(msgspec.Struct, frozen=True):
    """Library code that calls collectives on behalf of the user; ``alone``: its name if no user code made the call.

    ``path`` is part of a frame's file, ``functions`` are its functions that count (none: all)."""

    path: str
    functions: tuple[str, ...]
    words: str
    alone: str = ""


_CALLERS = (
    Caller(
        "loops/training_epoch_loop.py",
        ("_broadcast_sigterm_tensor",),
        "Lightning's SIGTERM check before each batch",
    ),
    Caller("connectors/signal_connector.py", (), "Lightning's handling of SIGTERM"),
    Caller(
        "logger_connector/",
        (),
        "self.log(..., sync_dist=True)",
        "self.log(..., sync_dist=True) at the end of the epoch",
    ),
    Caller("core/module.py", ("all_gather",), "self.all_gather()"),
    Caller("callbacks/model_checkpoint.py", (), "ModelCheckpoint"),
    Caller("callbacks/early_stopping.py", (), "EarlyStopping"),
    Caller("callbacks/timer.py", (), "the Timer callback"),
    Caller("trainer/trainer.py", ("save_checkpoint",), "trainer.save_checkpoint()"),
    Caller("loops/fit_loop.py", ("setup_data",), "the setup of the training loader"),
    Caller("loops/evaluation_loop.py", ("setup_data",), "the setup of the evaluation loader"),
    Caller("trainer/call.py", ("_call_setup_hook",), "the setup hooks"),
    Caller("connectors/data_connector.py", ("prepare_data",), "prepare_data()"),
    Caller("tuner/", (), "the Tuner"),
    Caller("torchmetrics/", (), "a torchmetrics metric"),
    Caller("transformers/trainer.py", ("_save_checkpoint", "save_model"), "saving a checkpoint"),
    Caller("transformers/trainer.py", ("_nested_gather", "_pad_across_processes"), "gathering of predictions"),
    Caller("accelerate/", ("gather", "gather_for_metrics", "reduce", "wait_for_everyone"), "accelerate"),
    Caller("torch/nn/utils/clip_grad.py", (), "clipping of gradients"),
    Caller("torch/distributed/checkpoint/", (), "a distributed checkpoint"),
    Caller("torch/distributed/optim/", (), "the sharded optimizer"),
    Caller("torch/distributed/fsdp/", (), "FSDP"),
    Caller("torch/nn/modules/batchnorm.py", (), "SyncBatchNorm"),
    Caller("deepspeed/", (), "DeepSpeed"),
    Caller("torch/nn/parallel/distributed.py", ("_sync_buffers", "_pre_forward"), "DDP's broadcast of buffers"),
    Caller("torch/nn/parallel/distributed.py", ("__init__", "_ddp_init_helper"), "the DDP constructor"),
    Caller("torch/autograd/graph.py", ("_engine_run_backward",), BACKWARD),
    Caller("torch/autograd/__init__.py", ("backward",), BACKWARD),
)
"""Of several callers the one in the innermost frame counts; for one frame, the first in this list."""
_CARRIERS = (
    Caller("/strategies/", ("reduce_boolean_decision",), "a decision that Lightning makes on all ranks together"),
    Caller("/strategies/", ("barrier", "reduce", "broadcast", "all_gather"), "Lightning"),
)
"""Callers that only forward a call; they count if there is no other."""


class CallSite(msgspec.Struct, frozen=True):
    """A call of a collective: ``operation``, the line that made it, and its caller in ``words``.

    ``frame``: the line of user code or, if a framework made the call by itself, the innermost one outside of torch.
    ``own``: it is user code. ``condition``: on the rank, see :class:`doctor.core.facts.Frame`."""

    operation: str
    frame: Frame | None
    own: bool
    words: str
    condition: str

    @property
    def place(self) -> str:
        """``train.py:57 (training_step)``; empty if no line is known."""
        is_native_wait = self.frame and self.frame.file == NATIVE_CODE and self.frame.function in NATIVE_WAITS
        return "" if is_native_wait else place_of_frame(self.frame)

    @property
    def text(self) -> str:
        """``all_gather at train.py:57 (training_step)``, ``barrier of ModelCheckpoint (model_checkpoint.py:622)``,
        ``all_reduce in the backward pass, called at train.py:42 (training_step)``."""
        if self.words == BACKWARD:
            what = f"{self.operation} in the backward pass" if self.operation else "the backward pass"
        else:
            what = " of ".join(part for part in (self.operation, self.words) if part)
        if not self.place or not what:
            return what or self.place
        if self.own:
            return f"{what}, called at {self.place}" if self.words else f"{what} at {self.place}"
        return f"{what} ({self.place.partition(' ')[0]})"


def place_of_frame(frame: Frame | None) -> str:
    """``train.py:57 (training_step)``; empty without a frame."""
    if frame is None:
        return ""
    if frame.file == NATIVE_CODE:
        return f"native code ({frame.function})"
    function = f" ({frame.function})" if frame.function and not frame.function.startswith("<") else ""
    return f"{frame.file.rpartition('/')[2]}:{frame.line}{function}"


def site_of(operation: str, frames: Sequence[Frame]) -> CallSite:
    """The call site of a collective, from its stack."""
    own = own_line(frames)
    near = frames[: frames.index(own) + 1] if own else frames
    outside = (frame for frame in frames if not is_torch(frame) and not is_doctor(frame))
    line = own or next(outside, frames[0] if frames else None)
    caller = _caller(near)
    words = (caller.alone if not own and caller.alone else caller.words) if caller else ""
    return CallSite(operation, line, own is not None, words, next(iter(conditions_of(frames)), ""))


def site_of_wait(frames: Sequence[Frame]) -> CallSite:
    """The call site of the collective that a rank with this stack waits in."""
    return site_of(waits_in(frames), frames)


def own_line(frames: Iterable[Frame]) -> Frame | None:
    """The innermost line of user code, unless a framework's loop is inside of it."""
    for frame in frames:
        if frame.user:
            return frame
        if any(driver in frame.file for driver in _DRIVERS):
            return None
    return None


def conditions_of(frames: Iterable[Frame]) -> list[str]:
    """All conditions on the rank in a stack, innermost first, including Lightning's wrapper for rank 0."""
    wrapped = (
        "@rank_zero_only" if frame.file.endswith("rank_zero.py") and frame.function == "wrapped_fn" else frame.condition
        for frame in frames
    )
    return [condition for condition in wrapped if condition]


def _caller(frames: Sequence[Frame]) -> Caller | None:
    found = (
        caller
        for callers in (_CALLERS, _CARRIERS)
        for frame in frames
        for caller in callers
        if caller.path in frame.file and (not caller.functions or frame.function in caller.functions)
    )
    return next(found, None)


SiteKey = tuple[object, ...]


def site_key(entry: Collective) -> SiteKey:
    """The identity of a call site: the operation, the innermost five lines outside of torch and three of user code.

    Not those of the doctor, which has several ways to the same call.

    Recorders keep these for older entries, see :mod:`doctor.monitor.telemetry.flight_recorder`."""
    outside = [frame for frame in entry.frames if not is_torch(frame) and not is_doctor(frame)]
    own = [frame for frame in outside if frame.user]
    return (entry.operation, *((frame.file, frame.line) for frame in (*outside[:5], *own[:3])))


def is_in_backward(stack: Sequence[Frame]) -> bool:
    """Whether the innermost frame is the one that runs the backward pass."""
    return bool(stack) and is_backward_engine(stack[0])


def is_below_backward(stack: Iterable[Frame]) -> bool:
    """Whether any frame is the one that runs the backward pass, such as below a hook of the user."""
    return any(map(is_backward_engine, stack))


class LocalWork(msgspec.Struct, frozen=True):
    """Work of a rank that waits for no other: its ``kind``, and the ``frame`` that shows it.

    ``is_next_batch``: known only from the point at which a loop waits for data."""

    kind: str
    frame: Frame | None
    is_next_batch: bool = False


_WORK = (
    ("debugger", r"/(?:pdb|bdb|ipdb|pudb|debugpy)[/.]|python\d\.\d+/code\.py:|pydevd"),
    ("saving", r"torch/serialization\.py:\w*save|/safetensors/.*:save|checkpoint_io.*:save_"),
    ("reading", r"torch/serialization\.py:\w*load|/safetensors/.*:load"),
    (
        "compiling",
        r"torch/_dynamo/convert_frame\.py|torch/_inductor/(?:compile_fx|codecache|async_compile|graph|scheduler)\.py"
        r"|/triton/compiler/|torch/utils/cpp_extension\.py",
    ),
    ("tokenizing", r"/tokenizers/|/tokenization_\w+\.py:|/sentencepiece/|/tiktoken/"),
    (
        "downloading",
        r"/(?:urllib3?|requests|httpx|huggingface_hub|botocore|boto3|s3fs|gcsfs|fsspec|aiohttp)/|http/client\.py:",
    ),
    ("loading", r"torch/utils/data/|site-packages/datasets/|/webdataset/|/litdata/|/ffcv/"),
    ("logging", r"/(?:wandb|mlflow|tensorboard|neptune|comet_ml)/|torch/utils/tensorboard/"),
    ("lock", r"/filelock/"),
    ("child", r"/subprocess\.py:"),
)
"""Kinds of work, and patterns of the files and functions that do it."""
_WORK_OF_POINT = {"data": "loading", "checkpoint": "saving", "setup": "setup"}
_WORK_OF_USER_CODE = (
    ("tokenizing", r"tokeni[sz](?:e|ation|ing)"),
    ("saving", r"(?:^|_)save(?:_|$)|write_checkpoint|dump_checkpoint"),
    ("downloading", r"download"),
    ("loading", r"^__getitems?__$|collate|prepare_data|load_(?:data|file|image|sample|batch)"),
)
"""Names of user functions that do it, if nothing else is known."""
_NEAR = 3
"""The number of innermost frames of user code that are considered."""


def local_work_of(stack: Sequence[Frame], point: str = "") -> LocalWork | None:
    """The work of a rank, by files in its stack, its last point, or names of user functions; ``None`` if unknown."""
    own = own_line(stack)
    for frame in stack:
        # Tools may shorten the path of a package's file to its part in the package.
        path = frame.file if frame.file.startswith(("/", "<")) else f"/site-packages/{frame.file}"
        for kind, pattern in _WORK:
            if not frame.user and re.search(pattern, f"{path}:{frame.function}"):
                return LocalWork(kind, own or frame)
    if point in _WORK_OF_POINT:
        return LocalWork(_WORK_OF_POINT[point], own, is_next_batch=point == "data")
    for frame in [frame for frame in stack if frame.user][:_NEAR]:
        for kind, pattern in _WORK_OF_USER_CODE:
            if re.search(pattern, frame.function):
                return LocalWork(kind, frame)
    return None
