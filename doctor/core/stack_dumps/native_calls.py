"""What functions of native code on a stack mean: a collective, a wait for the device, sleep or input and output.

Sources of the names: gloo/gloo/*.h and gloo/transport/*/unbound_buffer.h (https://github.com/pytorch/gloo),
torch/csrc/distributed/c10d/{ProcessGroupGloo,ProcessGroupNCCL,Work,TCPStore,reducer}.{cpp,hpp}, NCCL's src/nccl.h.in,
src/bootstrap.cc, src/init.cc and src/proxy.cc (https://github.com/NVIDIA/nccl), the MPI standard 4.1 (annex A.2), the
CUDA runtime and driver API (https://docs.nvidia.com/cuda), HIP's runtime API, and glibc's manual. NCCL's functions
return once a kernel is enqueued, so a thread that waits for a collective of NCCL is mostly found in a synchronization
of CUDA; the threads of its proxy (``ncclProxyProgress``, ``ncclProxyService``) wait in every healthy process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from doctor.core.facts import Frame, StackThread
from doctor.core.frames import NATIVE_CODE, is_backward_engine, waits_in
from doctor.core.text import lazy_compile
from doctor.knowledge.waiting_functions import ANY_COLLECTIVE, RENDEZVOUS

DEVICE_WAIT = "synchronization with the GPU"
"""The operation of a thread that waits for its device."""

_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgatherv": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
    "alltoallbase": "all_to_all",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "bcast": "broadcast",
    "gather": "gather",
    "reduce": "reduce",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
}
"""Operations by their names in lower case without underscores."""
_CALL = "|".join(sorted(_OPERATIONS, key=len, reverse=True))
_NAMED = tuple(
    lazy_compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"^nccl(?P<call>{_CALL})(?:_impl)?$",
        rf"^P?MPI_I?(?P<call>{_CALL})(?:_c|_init)?$",
        rf"^gloo::(?:\w+::)*(?P<call>reduce_scatter|{_CALL})$",
        rf"^c10d::(?:ops::(?:\w+::)*|\w*::?)?(?:ProcessGroup\w*|Backend)::_?(?P<call>reduce_scatter|{_CALL})\w*$",
        rf"^c10d::Async(?P<call>Reduce_?Scatter|{_CALL})\w*Work\b",
        r"^c10d::ProcessGroupGloo::(?P<call>Send|Recv)Work::wait$",
    )
)
"""Functions that name the operation."""
_MEANINGS = (
    (lazy_compile(r"^c10d::Reducer::(?:finalize_backward|\w*all_reduce\w*)"), "all_reduce"),
    (
        lazy_compile(
            r"^(?:ncclCommInit\w*|ncclCommSplit|bootstrap(?:Init|AllGather|Barrier|Net\w*|Send|Recv|Intra\w*)"
            r"|initTransportsRank|ncclTransport\w*Setup|ncclCommInitRank\w*|socketProgressOpt|c10d::\w*TCPClient\w*"
            r"|c10d::(?:TCPStore|PrefixStore|FileStore)::(?:wait|get|doGet|doWait|multiGet))"
        ),
        RENDEZVOUS,
    ),
    (
        lazy_compile(
            r"^(?:c10d::(?:\w+::)*\w*Work\w*::(?:wait|synchronize\w*)|ncclGroupEnd\w*|MPIDI?_\w*Progress\w*|MPI_Wait\w*"
            r"|P?MPI_Wait\w*|ompi_request_default_wait\w*|gloo::transport::\w+::(?:UnboundBuffer|Buffer)::wait\w+)"
        ),
        ANY_COLLECTIVE,
    ),
    (
        lazy_compile(
            r"^(?:cuda(?:Stream|Device|Event|Thread)Synchronize|cu(?:Stream|Ctx|Event)Synchronize|cudaMemcpy\w*"
            r"|cuMemcpy\w*|hip(?:Stream|Device|Event)Synchronize|hipMemcpy\w*|cudaEventQuery|ncclCommAbort"
            r"|at::native::_local_scalar_dense_(?:cuda|hip)|c10::cuda::(?:\w+::)*\w*[sS]ynchronize\w*)"
        ),
        DEVICE_WAIT,
    ),
)
"""Functions that show a wait but not for which operation, the more telling ones first."""
_PLUMBING = lazy_compile(
    r"^(?:0x[0-9a-f]+$|\?\?|_*(?:GI_+)*(?:futex|pthread|lll_|sem_|clone|start_thread|libc_|syscall|select|ppoll|poll"
    r"|epoll_)\w*|std::|pybind11::|_?Py|cfunction_|method_|vectorcall_|slot_tp|type_call|builtin_|main$|_start$"
    r"|run_mod|run_eval|pyrun|pymain|do_call|call_function|function_code|object_|partial_|_Py|trampoline)",
    re.IGNORECASE,
)
"""Functions of the C library and the interpreter that show nothing by themselves."""
_ALIAS = lazy_compile(r"^_+GI_+")
"""What glibc puts before the names of its internal aliases."""
_RUN_LOOPS = ("pt_gloo_runloop", "pt_mpi_runloop")
"""Threads of torch that carry out the collectives of a process group; the caller waits for them."""
_LONGEST = 200


def native_operation(native: Iterable[str]) -> str:
    """Return the operation that a native stack waits in; empty if it shows none. ``native``: innermost first."""
    names = [name.partition("(")[0].strip() for name in native]
    return next(_named(names), "") or next(
        (operation for pattern, operation in _MEANINGS if any(pattern.match(name) for name in names)), ""
    )


def _named(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        found = next((found for pattern in _NAMED if (found := pattern.match(name))), None)
        if found is not None:
            call = found["call"].replace("_", "").lower()
            yield _OPERATIONS.get(call, call)


def waiting_thread(threads: Sequence[StackThread]) -> StackThread | None:
    """Return the main thread with the stack that explains where it is; ``None`` if there is no main thread.

    In the backward pass collectives may be called in the thread of autograd, whose stack then precedes that of the
    main thread. A stack without Python frames becomes one frame of native code, named after the operation that it
    waits in or after its innermost telling function.
    """
    main = next((thread for thread in threads if thread.is_main), None)
    if main is None:
        return None
    if main.frames:
        inner = _of_autograd(threads) if is_backward_engine(main.frames[0]) else ()
        return msgspec.structs.replace(main, frames=(*inner, *main.frames)) if inner else main
    operation = native_operation(main.native)
    if operation == ANY_COLLECTIVE:
        operation = next(filter(None, map(native_operation, _run_loops(threads))), operation)
    name = operation or next((name for name in main.native if not _PLUMBING.match(name)), "")
    name = _ALIAS.sub("", name or next(iter(main.native), "")).partition("@")[0]
    return msgspec.structs.replace(main, frames=(Frame(NATIVE_CODE, 0, name[:_LONGEST]),)) if name else main


def _run_loops(threads: Iterable[StackThread]) -> Iterator[tuple[str, ...]]:
    return (
        thread.native
        for thread in threads
        if thread.name.startswith(_RUN_LOOPS) or any("AsyncWork::execute" in name for name in thread.native)
    )


def _of_autograd(threads: Iterable[StackThread]) -> tuple[Frame, ...]:
    """The stack of the only other thread that waits in a collective, and that no Python code started."""
    found = [
        thread.frames
        for thread in threads
        if not thread.is_main and waits_in(thread.frames) and not thread.frames[-1].file.endswith("threading.py")
    ]
    return found[0] if len(found) == 1 else ()
