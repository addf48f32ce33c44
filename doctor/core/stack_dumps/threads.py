"""Threads and frames as facts, from the text of a tool that read a process: bounded, printable and masked."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from itertools import islice

from doctor.core.facts import Frame, LocalVariable, StackThread
from doctor.core.frames import MOST, is_user_code, shorten_stack
from doctor.core.masking import mask_text, mask_value
from doctor.knowledge.training_processes import TRAINING_THREAD, TRAINING_THREAD_STARTS

MOST_THREADS = 1024
"""Threads of one process that are kept."""
MOST_FRAMES = 2000
"""Frames of one stack that are read; Python's recursion limit is 1000."""
MOST_NATIVE = 40
"""Native frames of one stack that are kept."""
OWN = 8
"""User frames that are kept beyond the innermost :data:`doctor.core.frames.MOST`."""
MOST_LOCALS = 200
"""Local variables of one thread that are kept."""
STEP_NAMES = (
    *("global_step", "train_step", "current_step", "iter_num", "iteration", "step", "step_idx", "step_index"),
    *("batch_idx", "batch_index", "batch_id", "batch_num"),
)
"""Names of locals that count training steps, the most telling ones first; those of libraries are kept, too."""
LONGEST_VALUE = 200
"""Maximum characters of the value of a local variable."""
LONGEST_NAME, LONGEST_PATH = 200, 1000
"""Maximum characters of a function's or thread's name, and of a file's."""
MOST_LINES = 1 << 31
"""Upper bound of a line number, which CPython keeps in a C int."""

_LIBRARIES = frozenset(
    """
    PIL absl accelerate aiohttp anyio apex asyncio attr bitsandbytes boto3 botocore click cloudpickle colossalai
    composer cupy cv2 dask datasets debugpy deepspeed diffusers distributed einops evaluate executorch fairscale
    fastapi fire flash_attn flask fsspec gcsfs google grpc gunicorn h5py httpx huggingface_hub hydra hydra_plugins
    ignite ipykernel jax jaxlib joblib jsonargparse lightning lightning_fabric lightning_utilities litdata
    llvmlite loguru lxml matplotlib mlflow mpi4py multiprocess numba numpy nvidia omegaconf onnx onnxruntime
    pandas peft polars psutil pyarrow pydantic pytest pytorch_lightning ray redis requests s3fs safetensors
    scipy sentencepiece sklearn starlette tenacity tensorboard tensorboardX tensorflow tensordict tiktoken timm
    tokenizers torch torchaudio torchao torchdata torchelastic torchmetrics torchrl torchtext torchvision tqdm
    transformer_engine transformers triton trl typer urllib3 uvicorn uvloop wandb webdataset websockets xarray
    xformers yaml zmq
    """.split()  # noqa: SIM905 - a hundred lines otherwise
)
"""Packages that training programs install; a path that was shortened to its package does not show where it lies."""
_USER_MODULES = frozenset({"__main__", "test", "tests"})
"""Modules of the standard library whose name is more often that of a program."""


def dumped_frame(file: str, line: int, function: str) -> Frame:
    """Return the frame of a stack that was read from outside; ``file`` may be shortened to its package.

    ``function``: without its class, as the interpreter names code objects (``co_name``).
    """
    file = _clean(file, LONGEST_PATH)
    name = _clean(function, LONGEST_NAME)
    bare = name if "." not in name else name.rpartition(".")[2]
    return Frame(file, line if 0 <= line < MOST_LINES else 0, bare, user=is_own_file(file))


def is_training_thread(name: str, calls: Iterable[tuple[str, str]]) -> bool:
    """Return whether a framework runs the training function in this thread rather than in the main one.

    ``calls``: file and function of its frames.
    """
    if name.startswith(TRAINING_THREAD):
        return True
    return any(
        function.rpartition(".")[2] == start and file.endswith(path)
        for file, function in calls
        for path, start in TRAINING_THREAD_STARTS
    )


@functools.lru_cache(maxsize=4096)
def is_own_file(file: str) -> bool:
    """Whether a file belongs to the user's program, also if its path begins at its package (``torch/nn/modules/…``)."""
    if file.startswith(("/", "<")):
        return is_user_code(file)
    package = file.replace("\\", "/").removeprefix("./").partition("/")[0].removesuffix(".py")
    if package in _USER_MODULES:
        return True
    return package not in _LIBRARIES and package not in sys.stdlib_module_names and is_user_code(file)


def dumped_thread(
    frames: Sequence[Frame],
    native: Iterable[str] = (),
    *,
    name: str = "",
    native_id: int = 0,
    is_main: bool = False,
    active: bool | None = None,
    holds_gil: bool = False,
    variables: Iterable[tuple[int, str, str]] = (),
) -> StackThread:
    """Return a thread; ``frames`` and ``native`` innermost first.

    ``variables``: index in ``frames``, name and value of local variables; those of the user's frames are kept.

    ``native``: names of native functions inside of the innermost Python frame, or of the whole stack if it has no
    Python frame: the interpreter's own functions between Python frames show nothing.
    """
    return StackThread(
        name=_clean(name, LONGEST_NAME),
        native_id=native_id if 0 <= native_id < 1 << 32 else 0,
        is_main=is_main,
        active=active,
        holds_gil=holds_gil,
        frames=shorten_stack(frames[:MOST_FRAMES], MOST, OWN),
        native=tuple(_clean(one, LONGEST_NAME) for one in native)[:MOST_NATIVE],
        locals=tuple(islice((dumped_local(*one) for one in variables if _keeps_local(frames, *one)), MOST_LOCALS)),
    )


def dumped_local(frame: int, name: str, value: str) -> LocalVariable:
    """Return a local variable; a value is masked by the name, too (``password``)."""
    name = _clean(name, LONGEST_NAME)
    return LocalVariable(frame, name, mask_value(name, _clean(value, LONGEST_VALUE)))


def _keeps_local(frames: Sequence[Frame], index: int, name: str, value: str) -> bool:
    """Whether the frame is the user's or the variable counts steps, and the shortened stack keeps its index."""
    counts = name in STEP_NAMES and value.isascii() and value.isdigit()
    return index < min(len(frames), MOST) and (frames[index].user or counts)


@functools.lru_cache(maxsize=4096)
def _clean(text: str, most: int) -> str:
    """Return printable text of bounded length without secrets; frames of many ranks repeat the same few texts."""
    text = text[: 4 * most]
    if not text.isprintable():
        text = "".join(one if one.isprintable() else "\ufffd" for one in text)
    return mask_text(text)[:most]  # a secret that the limit cuts would not be recognized
