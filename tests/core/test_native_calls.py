"""What native stacks mean: names that tools print, and the stack that explains where a process is."""

import pytest

from doctor.core.facts import Frame, StackThread
from doctor.core.frames import NATIVE_CODE, waits_in
from doctor.core.stack_dumps.native_calls import DEVICE_WAIT, native_operation, waiting_thread
from doctor.knowledge.waiting_functions import ANY_COLLECTIVE, RENDEZVOUS
from doctor.testing import package_frame, user_frame

ENGINE = Frame("/env/site-packages/torch/autograd/graph.py", 979, "_engine_run_backward")
GATHER = package_frame("torch/distributed/distributed_c10d.py", 2709, "all_gather_into_tensor")


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        ("ncclAllReduce", "all_reduce"),
        ("ncclReduceScatter", "reduce_scatter"),
        ("ncclBcast", "broadcast"),
        ("ncclSend", "send"),
        ("PMPI_Bcast_c", "broadcast"),
        ("MPI_Allreduce", "all_reduce"),
        ("gloo::allreduce", "all_reduce"),
        ("gloo::BarrierAllToOne::run", ""),
        ("gloo::alltoallv(gloo::AlltoallvOptions&)", "all_to_all"),
        ("c10d::AsyncAllreduceWork::allreduce(std::vector<at::Tensor>&)", "all_reduce"),
        ("c10d::AsyncBarrierWork::run()", "barrier"),
        ("c10d::ProcessGroupGloo::RecvWork::wait", "recv"),
        ("c10d::ProcessGroupNCCL::allreduce", "all_reduce"),
        ("c10d::ProcessGroupNCCL::_allgather_base", "all_gather"),
        ("c10d::ProcessGroupNCCL::reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("c10d::Reducer::finalize_backward", "all_reduce"),
        ("c10d::Work::wait", ANY_COLLECTIVE),
        ("c10d::ProcessGroupNCCL::WorkNCCL::synchronizeInternal", ANY_COLLECTIVE),
        ("gloo::transport::tcp::UnboundBuffer::waitRecv", ANY_COLLECTIVE),
        ("ncclCommInitRankConfig", RENDEZVOUS),
        ("bootstrapAllGather", RENDEZVOUS),
        ("c10d::TCPStore::wait", RENDEZVOUS),
        ("cudaStreamSynchronize", DEVICE_WAIT),
        ("cudaMemcpyAsync", DEVICE_WAIT),
        ("at::native::_local_scalar_dense_cuda(at::Tensor const&)::{lambda()#1}::operator", DEVICE_WAIT),
        ("hipDeviceSynchronize", DEVICE_WAIT),
        ("ncclProxyProgress", ""),
        ("epoll_wait", ""),
        ("__futex_abstimed_wait_common64", ""),
        ("clock_nanosleep", ""),
        ("reduce_gradients", ""),
        ("my::ncclAllReduceHelper", ""),
    ],
)
def test_meaning_of_a_function(function, operation):
    assert native_operation(["0x7f70b1ea3f16", "pthread_cond_wait", function, "main"]) == operation


def test_the_name_of_the_operation_counts_more_than_a_wait_inside_of_it():
    assert native_operation(["gloo::transport::tcp::UnboundBuffer::waitRecv", "gloo::allreduce"]) == "all_reduce"
    assert native_operation(["cudaStreamSynchronize", "ncclGroupEnd"]) == ANY_COLLECTIVE


def main_of(*frames, native=(), name="MainThread"):
    return StackThread(name, 7, True, frames=frames, native=tuple(native))


def test_a_native_stack_becomes_one_frame():
    thread = waiting_thread([main_of(native=["pthread_cond_wait", "ncclAllReduce", "main"])])
    assert thread.frames == (Frame(NATIVE_CODE, 0, "all_reduce"),)
    assert waits_in(thread.frames) == "all_reduce"
    thread = waiting_thread([main_of(native=["__GI___clock_nanosleep", "pysleep", "main"])])
    assert thread.frames == (Frame(NATIVE_CODE, 0, "clock_nanosleep"),)
    assert waits_in(thread.frames) == ""


def test_the_thread_that_runs_the_collective_names_it():
    loop = StackThread("pt_gloo_runloop", 8, native=("pthread_cond_wait", "c10d::AsyncBroadcastWork::run"))
    idle = StackThread("pt_gloo_runloop", 9, native=("pthread_cond_wait", "c10d::ProcessGroupGloo::runLoop"))
    main = main_of(native=["pthread_cond_wait", "c10d::Work::wait"])
    assert waiting_thread([idle, loop, main]).frames[0].function == "broadcast"
    assert waiting_thread([idle, main]).frames[0].function == ANY_COLLECTIVE


def test_the_collective_that_autograd_calls():
    """DeepSpeed gathers parameters in the threads of autograd, which no Python code has started."""
    main = main_of(ENGINE, user_frame(5))
    autograd = StackThread("", 8, frames=(GATHER, package_frame("deepspeed/comm/comm.py", 305, "all_gather")))
    assert waits_in(waiting_thread([main, autograd]).frames) == "all_gather_into_tensor"
    assert waiting_thread([main, autograd]).frames[-1] == user_frame(5)
    started = StackThread("w", 8, frames=(GATHER, Frame("/usr/lib/python3.11/threading.py", 1002, "_bootstrap")))
    assert waiting_thread([main, started]) == main
    assert waiting_thread([main_of(user_frame(5)), autograd]) == main_of(user_frame(5))


def test_without_a_main_thread():
    assert waiting_thread([StackThread("a", 8, native=("ncclAllReduce",))]) is None
    assert waiting_thread([]) is None
    assert waiting_thread([main_of()]) == main_of()
