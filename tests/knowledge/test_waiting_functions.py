"""The operation that a rank waits in, from the innermost frames of each library; functions as in its sources."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from doctor.core.facts import Frame
from doctor.core.frames import waiting_row, waits_for_device, waits_in
from doctor.knowledge.waiting_functions import _FORWARDERS, _ROWS, rests_for_others
from doctor.testing import package_frame, user_frame

C10D = "torch/distributed/distributed_c10d.py"
LOGGED = ("torch/distributed/c10d_logger.py", "wrapper")
RAY_GET = [
    ("ray/_private/worker.py", "get_objects"),
    ("ray/_private/worker.py", "get"),
    ("ray/_private/client_mode_hook.py", "wrapper"),
    ("ray/_private/auto_init_hook.py", "auto_init_wrapper"),
]


def stack(*frames: tuple[str, str]) -> tuple[Frame, ...]:
    return (*(package_frame(file, 1, function) for file, function in frames), user_frame(41))


@pytest.mark.parametrize(
    ("frames", "operation"),
    [
        # torch.distributed
        ([(C10D, "barrier"), LOGGED], "barrier"),
        ([(C10D, "monitored_barrier"), LOGGED], "monitored_barrier"),
        ([(C10D, "_store_based_barrier")], "store_based_barrier"),
        ([("torch/distributed/rendezvous.py", "_create_c10d_store")], "init_process_group"),
        ([("torch/distributed/elastic/utils/store.py", "barrier")], "barrier"),
        ([(C10D, "destroy_process_group")], "destroy_process_group"),
        ([(C10D, "_new_process_group_helper"), (C10D, "_new_group_with_tag"), (C10D, "new_group")], "new_group"),
        ([(C10D, "_store_based_barrier"), (C10D, "init_process_group"), LOGGED], "init_process_group"),
        # objects are sent as tensors: the call of the program names the operation
        ([(C10D, "broadcast"), LOGGED, (C10D, "broadcast_object_list"), LOGGED], "broadcast_object_list"),
        ([(C10D, "all_gather"), LOGGED, (C10D, "all_gather_object"), LOGGED], "all_gather_object"),
        ([(C10D, "gather"), LOGGED, (C10D, "gather_object"), LOGGED], "gather_object"),
        ([(C10D, "scatter"), LOGGED, (C10D, "scatter_object_list"), LOGGED], "scatter_object_list"),
        ([(C10D, "send"), LOGGED, (C10D, "send_object_list"), LOGGED], "send_object_list"),
        ([(C10D, "_object_to_tensor"), (C10D, "broadcast_object_list")], ""),
        # torch.distributed.checkpoint, Lightning, Fabric, Accelerate and DTensor call these
        (
            [(C10D, "gather_object"), LOGGED, ("torch/distributed/checkpoint/utils.py", "gather_object")],
            "gather_object",
        ),
        ([(C10D, "barrier"), LOGGED, ("lightning/fabric/utilities/distributed.py", "_sync_ddp")], "barrier"),
        ([(C10D, "barrier"), LOGGED, ("accelerate/state.py", "wait_for_everyone")], "barrier"),
        (
            [
                ("torch/_ops.py", "__call__"),
                ("torch/distributed/_functional_collectives.py", "wait_tensor"),
                ("torch/distributed/tensor/_redistribute.py", "redistribute_local_tensor"),
            ],
            "wait_tensor",
        ),
        ([("torch/distributed/checkpoint/_pg_transport.py", "recv_checkpoint")], "recv"),
        ([("torch/futures/__init__.py", "wait"), ("torch/distributed/checkpoint/state_dict_saver.py", "write")], ""),
        # DDP and ZeroRedundancyOptimizer
        ([("torch/distributed/utils.py", "_verify_param_shape_across_processes")], "all_gather"),
        ([("torch/distributed/utils.py", "_sync_params_and_buffers")], "broadcast"),
        ([("torch/nn/parallel/distributed.py", "_distributed_broadcast_coalesced")], "broadcast"),
        ([("torch/distributed/optim/zero_redundancy_optimizer.py", "_sync_params")], "broadcast"),
        # FSDP 1 and 2
        (
            [
                (C10D, "all_gather_into_tensor"),
                LOGGED,
                ("torch/distributed/fsdp/_flat_param.py", "_all_gather_flat_param"),
            ],
            "all_gather_into_tensor",
        ),
        ([("torch/distributed/fsdp/sharded_grad_scaler.py", "unscale_")], "all_reduce"),
        (
            [("torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_all_gather_copy_out")],
            "all_gather_into_tensor",
        ),
        (
            [("torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "finalize_backward")],
            "all_gather_into_tensor",
        ),
        # pipelines and tensor parallelism of torch
        ([("torch/distributed/pipelining/schedules.py", "_wait_batch_p2p")], "batch_isend_irecv"),
        ([("torch/distributed/tensor/_tp_conv.py", "_ring_send_recv_construct")], "batch_isend_irecv"),
        # DeepSpeed
        (
            [("deepspeed/utils/nvtx.py", "wrapped_fn"), ("deepspeed/runtime/zero/partition_parameters.py", "wait")],
            "all_gather_into_tensor",
        ),
        ([("deepspeed/runtime/zero/partition_parameters.py", "_reduce_scatter_gradients")], "reduce_scatter_tensor"),
        ([("deepspeed/runtime/pipe/p2p.py", "wait")], "batch_isend_irecv"),
        ([("deepspeed/sequence/layer.py", "pre_hook_fun")], "all_to_all_single"),
        ([("deepspeed/utils/nvtx.py", "wrapped_fn"), ("deepspeed/runtime/engine.py", "forward")], ""),
        # Megatron-LM, installed and from a checkout
        ([("megatron/core/pipeline_parallel/p2p_communication.py", "_communicate")], "batch_isend_irecv"),
        ([("megatron/core/distributed/param_and_grad_buffer.py", "finish_param_sync")], "all_gather_into_tensor"),
        ([("megatron/core/distributed/param_and_grad_buffer.py", "finish_grad_sync")], "collective"),
        ([("megatron/core/tensor_parallel/layers.py", "backward")], "collective"),
        ([("megatron/core/tensor_parallel/layers.py", "forward")], ""),
        (
            [("megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py", "all_reduce_gradients")],
            "all_reduce",
        ),
        # Horovod
        ([("horovod/torch/mpi_ops.py", "synchronize"), ("horovod/torch/mpi_ops.py", "allreduce")], "collective"),
        ([("horovod/torch/optimizer.py", "step")], ""),
        # Ray Train
        ([*RAY_GET, ("ray/train/v2/_internal/execution/collective_impl.py", "barrier")], "barrier"),
        (
            [
                *RAY_GET,
                ("ray/train/v2/_internal/execution/context.py", "_sync_checkpoint_dir_name_across_ranks"),
                ("ray/train/v2/_internal/execution/context.py", "report"),
            ],
            "ray.train.report",
        ),
        (RAY_GET, ""),  # of a task of the program's own
    ],
)
def test_what_a_rank_waits_in(frames: list[tuple[str, str]], operation: str) -> None:
    assert waits_in(stack(*frames)) == operation


def test_a_checkout_of_megatron_is_known_too() -> None:
    own = Frame(
        "/home/me/Megatron-LM/megatron/core/pipeline_parallel/p2p_communication.py", 418, "_communicate", user=True
    )
    assert waits_in((own,)) == "batch_isend_irecv"


@pytest.mark.parametrize(
    ("file", "function", "waits"),
    [
        ("torch/cuda/__init__.py", "synchronize", True),
        ("torch/cuda/streams.py", "synchronize", True),
        ("torch/accelerator/__init__.py", "synchronize", True),
        ("torch/cuda/streams.py", "record_event", False),
    ],
)
def test_synchronizations_with_the_device(file: str, function: str, waits: bool) -> None:
    assert waits_for_device(stack((file, function))) is waits
    assert waits_in(stack((file, function))) == ""


def test_rows_tell_functions_that_only_wait_from_files_that_also_compute() -> None:
    assert waiting_row(stack((C10D, "all_reduce"))).only_waits  # type: ignore[union-attr]
    assert not waiting_row(stack(("torch/distributed/fsdp/_flat_param.py", "_get_shard"))).only_waits  # type: ignore[union-attr]
    assert waiting_row(stack(("horovod/torch/mpi_ops.py", "synchronize"))).polls  # type: ignore[union-attr]


def test_files_in_which_only_others_keep_a_rank_without_cpu_time() -> None:
    assert rests_for_others("/env/site-packages/torch/distributed/fsdp/_runtime_utils.py")
    assert not rests_for_others("/env/site-packages/torch/distributed/checkpoint/filesystem.py")
    assert not rests_for_others("/home/me/train.py")


def test_the_installed_torch_has_the_functions_of_the_table() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("no torch")
    if tuple(map(int, importlib.metadata.version("torch").split(".")[:2])) < (2, 13):
        pytest.skip("the table follows torch 2.13")
    root = Path(spec.origin).parent.parent
    rows = [(row.path, row.functions) for row in _ROWS if row.path.startswith("torch/")]
    missing = []
    for path, functions in (*rows, *_FORWARDERS):
        file = root / path
        if path.startswith("torch/") and file.is_file():
            nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
            missing += [(path, one) for one in functions if one not in defined and one != "<listcomp>"]
        elif path.startswith("torch/") and not file.is_dir():
            missing.append((path, ""))
    assert missing == []
