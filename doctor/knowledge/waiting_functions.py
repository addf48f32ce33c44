"""Functions of Python libraries in which a rank waits for other ranks, or for its device.

A rank that waits is in C code, so its innermost Python frame is the function that called it. Lightning, Fabric,
Accelerate, torchmetrics, DTensor and ``torch.distributed.checkpoint`` call functions of ``torch.distributed``, which
are then innermost; so do most parts of DeepSpeed and Megatron-LM. The rows beyond are of libraries that keep the handle
of an asynchronous call and wait for it later.

Sources: torch 2.13 (torch/distributed, torch/nn/parallel/distributed.py, torch/cuda, torch/xpu, torch/accelerator);
https://github.com/deepspeedai/DeepSpeed at edaa722 (deepspeed/runtime/zero, runtime/pipe/p2p.py, utils/nvtx.py);
https://github.com/NVIDIA/Megatron-LM at d98e8a6 (megatron/core/distributed, pipeline_parallel, tensor_parallel);
https://github.com/horovod/horovod (horovod/torch/mpi_ops.py and mpi_ops_v2.cc, which polls each millisecond);
Ray 2.60 (ray/train/v2/_internal/execution); Lightning 2.6 (fabric/utilities/distributed.py).
"""

from __future__ import annotations

import functools

import msgspec

ANY_COLLECTIVE = "collective"
"""The operation of a rank that waits in a collective whose name is not known."""
RENDEZVOUS = "init_process_group"
"""The operation of a rank that waits for others before there is a communicator."""
OF_GROUPS = frozenset({RENDEZVOUS, "store_based_barrier", "new_group", "new_process_group_helper", "split_group"})
"""Operations of a rank that waits for the other members of a group that is being made."""


class WaitingFunctions(msgspec.Struct, frozen=True):
    """Functions that wait: ``path`` is part of their file, and without ``functions`` all in that file count.

    ``operation`` that they wait in; empty: the function's own name. ``only_waits``: they do hardly anything else, so
    that a rank in them waits even if its CPU is busy. ``polls``: the thread sleeps and wakes up meanwhile, so that its
    context switches do not show progress. ``computes``: in spite of their file, they do not wait at all.
    ``recorded``: flight recorders show their calls."""

    path: str
    functions: tuple[str, ...] = ()
    operation: str = ""
    only_waits: bool = True
    polls: bool = False
    computes: bool = False
    recorded: bool = True


def _rows(path: str, functions: str, operation: str = "") -> WaitingFunctions:
    return WaitingFunctions(path, tuple(functions.split()), operation)


_GATHER, _SCATTER, _TRANSFER = "all_gather_into_tensor", "reduce_scatter_tensor", "batch_isend_irecv"
_C10D = "torch/distributed/distributed_c10d.py"
_RPC = "torch/distributed/rpc/"
_DDP, _ZERO = "torch/nn/parallel/distributed.py", "deepspeed/runtime/zero/"
_MEGATRON = "megatron/core/"
_PIPELINE = f"{_MEGATRON}pipeline_parallel/"
_RAY = "ray/train/v2/_internal/execution/"

_ROWS = (
    # Objects are pickled on the host before they are sent, and unpickled afterwards.
    WaitingFunctions(_C10D, ("_object_to_tensor", "_tensor_to_object"), computes=True),
    WaitingFunctions(
        _C10D,
        ("init_process_group", "_store_based_barrier", "new_group", "_new_process_group_helper", "split_group"),
        polls=True,  # a FileStore is polled every 10 ms
        recorded=False,
    ),
    WaitingFunctions(_C10D, ("monitored_barrier",), recorded=False),  # ProcessGroupGloo::monitoredBarrier
    WaitingFunctions(_C10D),
    WaitingFunctions("torch/distributed/rendezvous.py", operation=RENDEZVOUS, polls=True, recorded=False),
    WaitingFunctions(
        "torch/distributed/elastic/utils/store.py", ("barrier", "synchronize", "get_all"), polls=True, recorded=False
    ),
    # init_rpc makes a separate Gloo group over a store, and then gathers the devices of all workers.
    WaitingFunctions(
        f"{_RPC}__init__.py", ("init_rpc", "_init_rpc_backend"), "rpc.init_rpc", polls=True, recorded=False
    ),
    WaitingFunctions(f"{_RPC}backend_registry.py", operation="rpc.init_rpc", polls=True, recorded=False),
    WaitingFunctions(f"{_RPC}api.py", ("shutdown", "_wait_all_workers"), "rpc.shutdown", recorded=False),
    WaitingFunctions(f"{_RPC}api.py", ("_all_gather", "_barrier"), recorded=False),
    WaitingFunctions("torch/distributed/nn/functional.py"),
    WaitingFunctions("torch/distributed/_functional_collectives.py"),
    _rows("torch/distributed/utils.py", "_verify_param_shape_across_processes", "all_gather"),
    _rows("torch/distributed/utils.py", "_sync_params_and_buffers _sync_module_states", "broadcast"),
    WaitingFunctions("torch/distributed/utils.py", only_waits=False),
    _rows("torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_all_gather_copy_out", _GATHER),
    _rows("torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "finalize_backward _reset_iter_state", _GATHER),
    _rows("torch/distributed/fsdp/sharded_grad_scaler.py", "unscale_", "all_reduce"),
    WaitingFunctions("torch/distributed/fsdp/", only_waits=False),
    _rows("torch/distributed/pipelining/schedules.py", "_wait_batch_p2p", _TRANSFER),
    _rows("torch/distributed/tensor/_tp_conv.py", "_ring_send_recv_construct _ring_send_recv_aggregate", _TRANSFER),
    _rows("torch/distributed/optim/zero_redundancy_optimizer.py", "wait_for_broadcasts _sync_params", "broadcast"),
    _rows("torch/distributed/optim/zero_redundancy_optimizer.py", "<listcomp>", "broadcast"),  # before Python 3.12
    _rows("torch/distributed/checkpoint/_pg_transport.py", "send_checkpoint", "send"),
    _rows("torch/distributed/checkpoint/_pg_transport.py", "recv_checkpoint recv", "recv"),
    WaitingFunctions("torch/distributed/algorithms/", only_waits=False),
    _rows(_DDP, "_pre_forward _distributed_broadcast_coalesced", "broadcast"),
    _rows(_DDP, "_match_all_reduce_for_bwd_pass _check_global_requires_backward_grad_sync", "all_reduce"),
    WaitingFunctions(_DDP, only_waits=False),
    _rows(f"{_ZERO}partition_parameters.py", "_reduce_scatter_gradients", _SCATTER),
    _rows(f"{_ZERO}partition_parameters.py", "_exit", "broadcast"),
    _rows(f"{_ZERO}partition_parameters.py", "wait _allgather_params_coalesced", _GATHER),
    _rows(f"{_ZERO}mics.py", "wait", _GATHER),
    _rows(
        f"{_ZERO}partitioned_param_coordinator.py",
        "fetch_sub_module _fetch_sub_module_impl _clean_inflight_param_registry release_and_reset_all",
        _GATHER,
    ),
    _rows("deepspeed/comm/torch.py", "all_gather_coalesced", _GATHER),
    _rows("deepspeed/runtime/pipe/p2p.py", "wait", _TRANSFER),
    _rows("deepspeed/runtime/domino/transformer.py", "forward backward inter_layer_overlap_forward", "all_reduce"),
    _rows("deepspeed/module_inject/layers.py", "backward", "all_reduce"),
    _rows("deepspeed/sequence/layer.py", "pre_hook_fun", "all_to_all_single"),
    _rows(f"{_PIPELINE}p2p_communication.py", "_communicate _communicate_shapes", _TRANSFER),
    _rows(
        f"{_PIPELINE}schedules.py",
        "forward_backward_pipelining_with_interleaving pp_pre_forward pp_post_forward pp_pre_backward pp_post_backward",
        _TRANSFER,
    ),
    _rows(
        f"{_PIPELINE}bridge_communicator.py",
        "send_forward_recv_backward send_backward_recv_forward _run_batched_payload_p2p _communicate_shapes",
        _TRANSFER,
    ),
    _rows(f"{_MEGATRON}transformer/multi_token_prediction.py", "roll_tensor _roll_tensor_packed_seq", _TRANSFER),
    _rows(f"{_MEGATRON}distributed/param_and_grad_buffer.py", "start_param_sync finish_param_sync wait", _GATHER),
    _rows(f"{_MEGATRON}distributed/param_and_grad_buffer.py", "free_overlap_buffers", _GATHER),
    _rows(f"{_MEGATRON}distributed/param_and_grad_buffer.py", "finish_grad_sync", ANY_COLLECTIVE),
    _rows("megatron_fsdp/param_and_grad_buffer.py", "all_gather_parameters", _GATHER),
    _rows("megatron_fsdp/param_and_grad_buffer.py", "reduce_scatter_gradients", _SCATTER),
    _rows("megatron_fsdp/param_and_grad_buffer.py", "all_reduce_gradients", "all_reduce"),
    _rows(f"{_MEGATRON}tensor_parallel/layers.py", "backward", ANY_COLLECTIVE),
    _rows(f"{_MEGATRON}tensor_parallel/mappings.py", "forward", "all_to_all_single"),
    _rows(f"{_MEGATRON}utils.py", "drain_embedding_wgrad_compute", _GATHER),
    WaitingFunctions("horovod/torch/mpi_ops.py", ("synchronize",), ANY_COLLECTIVE, polls=True),
    # Lightning's _InfiniteBarrier calls the method of its own group, of lightning and of lightning_fabric.
    WaitingFunctions("fabric/utilities/distributed.py", ("__exit__",), "monitored_barrier", recorded=False),
    # ray.train.report and ray.train.collective: an actor answers once all workers have called it.
    WaitingFunctions(
        f"{_RAY}context.py", ("_sync_checkpoint_dir_name_across_ranks",), "ray.train.report", recorded=False
    ),
    WaitingFunctions(f"{_RAY}collective_impl.py", ("barrier", "broadcast_from_rank_zero"), recorded=False),
)
"""The first row that fits counts."""

_FORWARDERS = (
    ("torch/distributed/c10d_logger.py", ()),
    ("torch/_ops.py", ()),
    ("torch/futures/__init__.py", ("wait",)),
    ("deepspeed/utils/nvtx.py", ("wrapped_fn",)),
    ("ray/_private/worker.py", ("get", "get_objects")),
    ("ray/_private/auto_init_hook.py", ("auto_init_wrapper",)),
    ("ray/_private/client_mode_hook.py", ("wrapper",)),
)
"""Functions that only call the one that waits: the frame around them shows what it is."""

_SYNCHRONIZATIONS = (
    "torch/cuda/__init__.py",
    "torch/cuda/streams.py",
    "torch/xpu/__init__.py",
    "torch/xpu/streams.py",
    "torch/accelerator/__init__.py",
)
"""Files whose ``synchronize`` waits for the device."""

_OF_LOCK_FILES = ("/torch/utils/file_baton.py", "/filelock/")
"""Files that wait for a lock file, whoever made it."""

_OF_OBJECTS = frozenset(
    {
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    }
)
"""Functions of ``torch.distributed`` that make several calls of others: they name what the program called."""

_AT_REST = (
    "torch/_ops.py",  # calls an operator: compiled programs call those of collectives
    "torch/distributed/fsdp/",
    "torch/distributed/pipelining/",
    "torch/distributed/tensor/",
    "torch/distributed/_symmetric_memory/",
    "torch/nn/parallel/",
    "deepspeed/comm/",
    "deepspeed/runtime/pipe/",
    "deepspeed/runtime/zero/",
    "megatron/core/distributed/",
    "megatron/core/pipeline_parallel/",
    "megatron/core/tensor_parallel/",
    "horovod/torch/",
)
"""Files in whose functions nothing but another rank or the device can keep a thread without CPU time."""


@functools.lru_cache(maxsize=4096)
def waiting_functions(file: str, function: str) -> WaitingFunctions | None:
    """Return the row of a function; ``None`` if it does not wait for others."""
    found = (row for row in _ROWS if row.path in file and (not row.functions or function in row.functions))
    row = next(found, None)
    return None if row is None or row.computes else row


@functools.lru_cache(maxsize=4096)
def forwards(file: str, function: str) -> bool:
    """Whether a function only forwards the call of the one that waits."""
    return any(path in file and (not names or function in names) for path, names in _FORWARDERS)


def is_of_collectives(file: str) -> bool:
    """Whether a file is the one with the collectives of ``torch.distributed``, some of which call others."""
    return _C10D in file


def transfers_objects(function: str) -> bool:
    """Whether a function of ``torch.distributed`` transfers objects, by several calls."""
    return function in _OF_OBJECTS


def synchronizes(file: str, function: str) -> bool:
    """Whether a function waits for the device."""
    return function == "synchronize" and file.endswith(_SYNCHRONIZATIONS)


def rests_for_others(file: str) -> bool:
    """Whether a thread without CPU time whose innermost frame is in this file waits for others."""
    return any(path in file for path in _AT_REST)


def tries_lock_file(file: str) -> bool:
    """Whether the functions of a file do nothing but wait until a lock file is gone, or its lock free."""
    return any(path in file for path in _OF_LOCK_FILES)
