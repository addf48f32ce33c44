"""What logs say of devices, memory, hosts and software, in the wordings of many releases and launchers: the check that
names the cause comes first, blames who said it, and harmless look-alikes are left alone."""

import re

import pytest

from doctor.api import Severity, Status
from doctor.core.check_registry import CheckRegistry, builtin_checks, playbook_directory
from doctor.core.check_runner import examine_job
from doctor.core.report_summary import primary_of
from doctor.session import examine
from doctor.testing import logged
from tests.lab.cases import each_case

FAMILIES = ("devices", "memory", "host", "software")
CATALOG = CheckRegistry(tuple(check for check in builtin_checks() if check.family in FAMILIES))

OOM = (
    "CUDA out of memory. Tried to allocate {wanted}. GPU {device} has a total capacity of 79.15 GiB of which {free} is "
    "free. {others}Including non-PyTorch memory, this process has {own} memory in use. Of the allocated memory "
    "{tensors} is allocated by PyTorch, and {idle} is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
FULL = {"device": 3, "free": "1.02 GiB", "others": "", "own": "78.10 GiB", "tensors": "76.50 GiB", "idle": "512.00 MiB"}


def oom(wanted="2.00 GiB", **numbers):
    return OOM.format(wanted=wanted, **{**FULL, **numbers})


SPOKEN = {
    "GPU001": [
        "0: node7:1234:1300 [0] NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
        "(RayWorker pid=77) [rank1]: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 50",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 3 and rank 0 both on CUDA device 3000",
        "[1,4]<stderr>:init.cc:497 NCCL WARN Duplicate GPU detected : rank 4 and rank 0 both on CUDA device 1000",
        "node7:41:77 [0] init.cc:1057 NCCL WARN Multiple Ranks are using the same GPU/Partition. Set "
        "NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration.",
    ],
    "GPU002": [
        "THCudaCheck FAIL file=/pytorch/torch/csrc/cuda/Module.cpp line=33 error=10 : invalid device ordinal",
        "RuntimeError: cuda runtime error (101) : invalid device ordinal at /pytorch/torch/csrc/cuda/Module.cpp:59",
        "[rank5]: torch.AcceleratorError: CUDA error: invalid device ordinal\n[rank5]: Search for "
        "`cudaErrorInvalidDevice' in https://docs.nvidia.com/cuda/cuda-runtime-api/ for more information.",
        "node7:41:77 [4] NCCL WARN Cuda failure 101 'invalid device ordinal'",
        "(worker3): RuntimeError: CUDA error: invalid device ordinal",
        "RuntimeError: HIP error: invalid device ordinal",
        "ValueError: Tensor parallel size (16) cannot be larger than the number of available GPUs (8).",
        "RuntimeError: Attempting to deserialize object on CUDA device 7 but torch.cuda.device_count() is 4. Please "
        "use torch.load with map_location to map your storages to an existing device.",
    ],
    "GPU009": [
        "RuntimeError: cuda runtime error (39) : uncorrectable ECC error encountered at /pytorch/THC/Allocator.cpp:265",
        "[E ProcessGroupNCCL.cpp:916] [Rank 1] NCCL watchdog thread terminated with exception: CUDA error: "
        "uncorrectable ECC error encountered",
        "failed call to cuDevicePrimaryCtxRetain: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered",
        "[Mon Jan  5 10:00:01 2026] NVRM: Xid (PCI:0000:3b:00): 48, pid=4242, name=python, DBE (double bit error) 00",
        "kernel: NVRM: Xid (PCI:0000:3b:00): 64, pid='<unknown>', name=<unknown>, Row Remapper: failed",
        "Jan  5 10:00:01 node7 kernel: [86400.1] NVRM: Xid (PCI:0000:3b:00): 95, pid=4242, Uncontained: FBHUB",
    ],
    "GPU010": [
        "kernel: NVRM: Xid (PCI:0000:4f:00): 119, pid=7194, name=python, Timeout after 6s of waiting for RPC response",
        "[86400.5] NVRM: Xid (PCI:0000:4f:00): 62, pid='<unknown>', name=<unknown>, 0x2a5a 0x9c 0x1",
        "<4>1 2026-01-05T10:00:01Z node7 kernel - - - NVRM: Xid (PCI:0000:4f:00): 109, pid=7194, CTX SWITCH TIMEOUT",
    ],
    "GPU013": [
        "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
        "[rank2]: torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution",
        "node7:41:77 [3] NCCL WARN Cuda failure 220 'uncorrectable NVLink error detected during the execution'",
        "kernel: NVRM: Xid (PCI:0000:8a:00): 74, pid=4242, name=python, NVLink: fatal error detected on link 6(0x0, "
        "0x0)",
        "kernel: NVRM: Xid (PCI:0000:66:00): 149, NETIR_LINK_EVT  Fatal   XC1 i0 Link 08 (0x004505c6 0x00000000)",
        "kernel: nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    ],
    "GPU014": [
        "RuntimeError: cuda runtime error (802) : system not yet initialized at THCGeneral.cpp:50",
        "  what():  Error (gpu_burn-drv.cpp:298): system not yet initialized",
        'CUDA error at bandwidthTest.cu:256 code=802(cudaErrorSystemNotReady) "cudaSetDevice(currentDevice)"',
        "UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions "
        "before calling NumCudaDevices() that might have already set an error? Error 802: system not yet initialized",
        "node7:12098:12141 [2] transport/nvls.cc:244 NCCL WARN Cuda failure 1 'invalid argument'",
        "systemd[1]: Failed to start NVIDIA fabric manager service.",
    ],
    "GPU018": [
        "RuntimeError: CUDA error: peer access is not supported between these two devices",
        "node7:41:77 [0] NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'",
        "NotImplementedError: Using RTX 4000 series doesn't support faster communication broadband via P2P or IB. "
        "Please "
        'set `NCCL_P2P_DISABLE="1"` and `NCCL_IB_DISABLE="1" or use `accelerate launch` which will do this '
        "automatically.",
        "graph/paths.cc:300 NCCL WARN P2P is disabled between NVLINK connected GPUs 3 and 1. This should not be the "
        "case given their connectivity, and is probably due to a hardware issue.",
        "node7:41:77 [1] transport/p2p.cc:275 NCCL WARN Cuda failure 'mapping of buffer object failed'",
    ],
    "GPU019": [
        "Unable to determine the device handle for GPU0000:03:00.0: Unknown Error",
        "Unable to determine the device handle for gpu 0000:3B:00.0: GPU is lost.  Reboot the system to recover this "
        "GPU",
        "kernel: NVRM: GPU at PCI:0000:b3:00: GPU-4f2a\nkernel: NVRM: GPU at PCI:0000:b3:00: GPU has fallen off the "
        "bus.",
        "kernel: NVRM: Xid (PCI:0000:b3:00): 79, pid=4242, name=python, GPU has fallen off the bus.",
        "pynvml.nvml.NVMLError_GpuIsLost: GPU is lost",
        "dcgm: GPU 3 reported Xid 79",
    ],
    "GPU021": [
        "RuntimeError: Distributed package doesn't have NCCL built in",
        "RuntimeError: Distributed package doesn't have MPI built in. MPI is only included if you build from source.",
        "AssertionError: Torch not compiled with CUDA enabled",
        "RuntimeError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        "MisconfigurationException: No supported gpu backend found!",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU.",
    ],
    "GPU022": [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: unspecified launch "
        "failure",
        "/pytorch/aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], "
        "thread: [5,0,0] Assertion `t >= 0 && t < n_classes` failed.",
        "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
        "RuntimeError: CUDA driver error: CUDA_ERROR_ILLEGAL_ADDRESS",
        "node7:41:77 [2] enqueue.cc:1440 NCCL WARN Cuda failure 719 'unspecified launch failure'",
        "Memory access fault by GPU node-1 (Agent handle: 0x5581c4e0) on address 0x7f2b10000000. Reason: Unknown.",
    ],
    "GPU023": [
        "mnnvl.cc:66 NCCL WARN MNNVL is available but not working on some system. Check the IMEX configuration.",
        "Failed to open /dev/nvidia-caps-imex-channels/channel0: No such file or directory",
        "systemd[1]: nvidia-imex.service: Main process exited, code=exited, status=1/FAILURE",
    ],
    "MEM006": [
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.20 GiB (GPU 0; 3.95 GiB total capacity; "
        "246.26 MiB already allocated; 770.62 MiB free; 1.91 GiB reserved in total by PyTorch) If reserved memory is "
        ">> allocated memory try setting max_split_size_mb to avoid fragmentation.",
        "[rank1]: torch.OutOfMemoryError: " + oom("1.50 GiB", free="640.00 MiB", tensors="58.20 GiB", idle="18.70 GiB"),
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of "
        "6.00 GiB of which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is "
        "reserved by PyTorch but unallocated.",
    ],
    "MEM010": [
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "RuntimeError: DataLoader worker (pid 325) is killed by signal: Bus error. ",
        "node7:41:77 [2] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-1bDvqE to 33030276 bytes, "
        "error: No space left on device (28)",
        "RuntimeError: unable to write to file </torch_1394_2747491098>",
        "RuntimeError: unable to write to file </torch_1234_5678_0>: No space left on device (28)",
        "[node7:5283 :0:5704] Caught signal 7 (Bus error: nonexistent physical address)",
        "[2026-01-05 10:00:01,123] [ERROR] [launch.py:321:sigkill_handler] ['python', 'train.py'] exits with return "
        "code = -7",
        "srun: error: node7: task 3: Bus error (core dumped)",
    ],
    "MEM011": [
        "[rank3]: torch.OutOfMemoryError: " + oom(),
        "[rank0]: torch.OutOfMemoryError: "
        + oom(device=0, others="Process 4242 has 40.01 GiB memory in use. ", own="38.00 GiB", tensors="36.00 GiB"),
        "RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 7.93 GiB total capacity; 6.19 GiB "
        "already allocated; 340.00 MiB free; 551.04 MiB cached)",
        "RuntimeError: CUDA out of memory. Tried to allocate 3.05 GiB (GPU 2; 31.75 GiB total capacity; 29.80 GiB "
        "already allocated; 1.10 GiB free; 30.02 GiB reserved in total by PyTorch)",
        "RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 63.98 "
        "GiB of which 1.24 GiB is free. Of the allocated memory 61.00 GiB is allocated by PyTorch, and 512.00 MiB is "
        "reserved by PyTorch but unallocated.",
        "node7:1234:5678 [0] include/alloc.h:200 NCCL WARN Cuda failure 2 'out of memory'",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
    "MEM001": [
        "[rank0]: torch.OutOfMemoryError: "
        + oom(
            device=0,
            others="".join(f"Process {pid} has 620.00 MiB memory in use. " for pid in range(4243, 4250)),
            free="300.00 MiB",
            own="74.50 GiB",
            tensors="71.00 GiB",
        ),
        "[rank2]: Traceback (most recent call last):\n"
        '[rank2]:   File "/home/me/train.py", line 80, in resume\n'
        "[rank2]:     state = torch.load(path)\n"
        '[rank2]:   File "/opt/lib/python3.11/site-packages/torch/serialization.py", line 1462, in load\n'
        "[rank2]:     return _load(opened_zipfile, map_location, pickle_module)\n"
        "[rank2]: torch.OutOfMemoryError: "
        + oom(
            device=0,
            others="Process 4242 has 70.01 GiB memory in use. ",
            free="1.00 GiB",
            own="8.00 GiB",
            tensors="7.00 GiB",
        ),
        "|    0   N/A  N/A     62250      C   python      40903MiB |\n|    0   N/A  N/A     62251      C   python      "
        "  725MiB |\n"
        "|    1   N/A  N/A     62251      C   python      40903MiB |",
    ],
    "MEM008": [
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: not enough memory: you tried to "
        "allocate 9663676416 bytes.",
        "numpy.core._exceptions.MemoryError: Unable to allocate 35.3 GiB for an array with shape (1, 2) and data type "
        "f8",
        "OSError: [Errno 12] Cannot allocate memory",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
    "MEM012": [
        "Out of memory: Kill process 9163 (python) score 912 or sacrifice child",
        "[1.2] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0-1,oom_memcg=/docker/4f2a",
        "slurmstepd: error: Detected 3 oom-kill event(s) in step 57.0 cgroup. Some of your processes may have been "
        "killed by the cgroup out-of-memory handler.",
        "slurmstepd: error: Exceeded job memory limit at some point.",
        "slurmstepd: error: *** JOB 42 ON node7 CANCELLED AT 2026-01-05T10:00:01 ***\nslurmstepd: error: Step 42.0 "
        "exceeded memory limit (70254592 > 67108864), being killed",
        "srun: error: node7: task 0: Out Of Memory\nslurmstepd: error: Detected 1 oom_kill event in StepId=42.0.",
        "(raylet) node_manager.cc:3040: 2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers "
        "crashed",
        "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ",
        "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL",
        "Process finished with exit code 137 (interrupted by signal 9:SIGKILL)",
        "[INFO] [utils.py:832:see_memory_usage] CPU Virtual Memory:  used = 29.71 GB, percent = 95.3%\n"
        "[ERROR] [launch.py:321:sigkill_handler] ['python', 'train.py'] exits with return code = -9",
        "run.sh: line 12: 12345 Killed                  python train.py",
        "subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.SIGKILL: 9>.",
    ],
    "HOST001": [
        "node7:41:77 [0] misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate "
        "memory",
        "node7:41:77 [7] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory",
        "NCCL WARN Call to ibv_create_qp failed with error Cannot allocate memory errno 12",
        "UCX ERROR ibv_create_cq(cqe=4096) failed: Cannot allocate memory\nmax locked memory       (kbytes, -l) 64",
        "The OpenFabrics (openib) BTL failed to initialize while trying to allocate some locked memory.",
    ],
    "HOST002": [
        "OSError: [Errno 24] Too many open files",
        "RuntimeError: Too many open files. Communication with the workers is no longer possible. Please increase the "
        "limit using `ulimit -n` in the shell or change the sharing strategy",
        "RuntimeError: received 0 items of ancdata",
        "RuntimeError: unable to open shared memory object </torch_29919_1396182366> in read-write mode: Too many open "
        "files (24)",
        "node7:41:77 [0] misc/socket.cc:495 NCCL WARN Call to socket failed : Too many open files",
        "[W socket.cpp:401] [c10d] The server socket on [::]:29500 has failed to accept: (errno: 24 - Too many open "
        "files).",
    ],
    "HOST006": [
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use "
        "the 'spawn' start method",
        "RuntimeError: Lightning can't create new processes if CUDA is already initialized. Did you manually call "
        "`torch.cuda.*` functions, have moved the model to the device, or allocated memory on the GPU any other way?",
        "RuntimeError: CUDA has been initialized before the `notebook_launcher` could create a forked subprocess. This "
        "likely stems from an outside import causing issues once the `notebook_launcher()` is called.",
        "ValueError: To launch a multi-GPU training from your notebook, the `Accelerator` should only be initialized "
        "inside your training function. Restart your notebook and make sure no cells initializes an `Accelerator`.",
        "RuntimeError: cuda runtime error (3) : initialization error at /pytorch/aten/src/THC/THCGeneral.cpp:47",
        "RuntimeError: Cannot re-initialize XPU in forked subprocess.",
    ],
    "HOST007": [
        "RuntimeError: can't start new thread",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 23 of 64: Resource temporarily unavailable",
        "libgomp: Thread creation failed: Resource temporarily unavailable",
        "bash: fork: retry: No child processes",
        "kernel: cgroup: fork rejected by pids controller in /docker/4f2a",
        "terminate called after throwing an instance of 'std::system_error'\n  what():  Resource temporarily "
        "unavailable",
    ],
    "HOST008": [
        "filelock._error.Timeout: The file lock '/home/me/.cache/huggingface/x.lock' could not be acquired.",
        "Traceback (most recent call last):\n"
        '  File "/opt/lib/python3.10/site-packages/torch/utils/cpp_extension.py", line 1709, in _jit_compile\n'
        "    baton.wait()\n"
        '  File "/opt/lib/python3.10/site-packages/torch/utils/file_baton.py", line 42, in wait\n'
        "    time.sleep(self.wait_seconds)\nKeyboardInterrupt",
        'UserWarning: Waited on lock file "/home/me/.cache/extensions/py310_cu121/fused_adam/lock" for 300 seconds.',
    ],
    "HOST009": [
        "Failed to initialize NVML: Unknown Error",
        'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
        "open(/dev/nvidia-uvm): No such file or directory",
        "libibverbs: Warning: couldn't open /dev/infiniband/uverbs0: Permission denied",
    ],
    "VER002": [
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
        "driver",
        "Test CUDA failure common.cu:891 'CUDA driver version is insufficient for CUDA runtime version'",
        "RuntimeError: cuda runtime error (35) : CUDA driver version is insufficient for CUDA runtime version at "
        "x.cpp:74",
        "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 804: forward compatibility was attempted on "
        "non supported HW",
        "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.4, please update your driver",
        "Failed to initialize NVML: Driver/library version mismatch",
    ],
    "VER003": [
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch installation.",
        "UserWarning: Found GPU0 Tesla K40c which is of cuda capability 3.5. PyTorch no longer supports this GPU "
        "because it is too old.",
        "node7:41:77 [0] enqueue.cc:100 NCCL WARN Cuda failure 209 'no kernel image is available for execution on the "
        "device'",
        "nvcc fatal   : Unsupported gpu architecture 'compute_90'",
    ],
    "VER006": [
        "TypeError: Trainer.__init__() got an unexpected keyword argument 'gpus'",
        "----> 3 trainer = pl.Trainer(auto_select_gpus=True)\n"
        "TypeError: __init__() got an unexpected keyword argument 'auto_select_gpus'",
        "Traceback (most recent call last):\n"
        '  File "/opt/lib/python3.8/site-packages/pytorch_lightning/utilities/argparse.py", line 70, in '
        "insert_env_defaults\n"
        "    return fn(self, **kwargs)\n"
        "TypeError: __init__() got an unexpected keyword argument 'replace_sampler_ddp'",
        "ValueError: You selected an invalid strategy name: `strategy='dp'`. It must be either a string or an instance "
        "of `pytorch_lightning.strategies.Strategy`.",
        "NotImplementedError: Support for `validation_epoch_end` has been removed in v2.0.0. `Net` implements this "
        "method.",
        "AttributeError: type object 'Trainer' has no attribute 'add_argparse_args'",
        "TypeError: Trainer.__init__() got an unexpected keyword argument 'progress_bar_refresh_rate'",
    ],
}


def examined(text):
    return examine_job(logged(*text.splitlines()).job(), CATALOG)


@each_case(
    ("cause", "text"),
    [(cause, text) for cause, texts in SPOKEN.items() for text in texts],
    ids=[f"{cause}-{place}" for cause, texts in SPOKEN.items() for place in range(len(texts))],
)
def test_the_cause_is_named(cause, text):
    results = examined(text)
    assert primary_of(results) == cause, {result.id: result.findings for result in results if result.findings}
    (result,) = (result for result in results if result.id == cause)
    assert all(finding.source and finding.evidence["said"] for finding in result.findings)


HARMLESS = {
    "tables": """
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.124.06             Driver Version: 570.124.06     CUDA Version: 12.8     |
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:19:00.0 Off |                    0 |
| N/A   45C    P0            612W /  700W |   71234MiB /  81559MiB |     98%      Default |
|    0   N/A  N/A     62250      C   /usr/bin/python                              71224MiB |
|    1   N/A  N/A     62251      C   /usr/bin/python                              71224MiB |
""",
    "NCCL at its start": """
node7:41:77 [0] NCCL INFO cudaDriverVersion 12080
node7:41:77 [0] NCCL INFO P2P is disabled between connected GPUs 1 and 0. You can repress this message.
node7:41:77 [0] NCCL INFO MNNVL busId 0x19000 fabric UUID 0.0 cliqueId 0x0 state 3 healthMask 0x0
node7:41:77 [0] NCCL INFO NVLS multicast support is not available on dev 0
node7:41:77 [0] NCCL INFO comm 0x55 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 19000 commId 0x1 - Init COMPLETE
node7:41:77 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
node7:41:77 [0] NCCL WARN Missing "iommu=pt" from kernel command line which can lead to system instablity or hang!
""",
    "advice": """
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
UserWarning: This DataLoader will create 16 worker processes in total. Our suggested max number of worker is 8.
export CUDA_VISIBLE_DEVICES=0,1,2,3
LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0,1,2,3]
LightningDeprecationWarning: Setting `Trainer(gpus=1)` is deprecated in v1.7 and will be removed in v2.0.
huggingface/tokenizers: The current process just got forked, after parallelism has already been used.
max locked memory       (kbytes, -l) 64
open files                      (-n) 1024
""",
    "numbers that look like codes": """
step 137 exit loss 9.0 code 79
replication: xid=731204, xid: 4711002
Detected 0 oom_kill events in StepId=42.0
GPU 0: 0 uncorrectable ECC errors
Process finished with exit code 0
peak memory 76.5 GiB of 79.2 GiB reserved, 0 retries, 0 ooms
[12.3] nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error
[12.4] pcieport 0000:00:03.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)
""",
    "what a program's own fault leaves": """
[86400.5] NVRM: Xid (PCI:0000:0f:00): 31, pid=7194, name=python, Ch 00000008, intr 00000000. MMU Fault
[86401.5] NVRM: Xid (PCI:0000:0f:00): 43, pid=7194, name=python, Ch 00000008
[86402.5] NVRM: Xid (PCI:0000:0f:00): 45, pid=7194, name=python, Ch 00000010
""",
    "a launcher that cleans up": """
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 12, in <module>
[rank1]:     a, b = batch
[rank1]: ValueError: too many values to unpack (expected 2)
W0105 10:00:03 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 4711 closing signal SIGTERM
W0105 10:00:33 torch/distributed/elastic/multiprocessing/api.py:919] Unable to shutdown process 4711 via \
Signals.SIGTERM, forcefully exiting via Signals.SIGKILL
E0105 10:00:34 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 0 (pid: 4711) \
of binary: /usr/bin/python
""",
}


@pytest.mark.parametrize("text", HARMLESS.values(), ids=HARMLESS)
def test_what_is_harmless_is_left_alone(text):
    results = examined(text)
    loud = [f for result in results for f in result.findings if f.severity is not Severity.INFO]
    assert not loud
    assert primary_of(results) is None


@each_case("check", [check for check in CATALOG.checks if "M" in check.when], ids=lambda check: check.id)
def test_what_the_page_shows_is_heard(check):
    """The texts that people paste into a search box."""
    page = (playbook_directory() / f"{check.id}.md").read_text()
    see = page.partition("## What you see")[2].partition("## Confirm it")[0]
    shown = re.findall(r"```\w*\n(.*?)```", see, flags=re.DOTALL)
    (result,) = examine_job(logged(*"\n".join(shown).splitlines()).job(), CheckRegistry((check,)))
    assert result.findings


GARBLED = """\
NVRM: Xid (PCI:0000:3b:00): 000, foo
Duplicate GPU detected : rank 99999999999999999999 and rank 1 both on CUDA device ffffffffffffffffffffffffffffffff
srun: error: node7: tasks 0-99999999999999,5,,-: Out Of Memory
RuntimeError: The NVIDIA driver on your system is too old (found version 99999999999999999999999)
CPU Virtual Memory:  used = 1.1 GB, percent = 9.9.9%
exits with return code = -9
|    0     99999999999      C   x   9999999MiB |
LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: []
LOCAL_RANK: 1 - CUDA_VISIBLE_DEVICES: [,,,]
Still waiting to acquire lock on x (elapsed: 1.2.3 seconds)
Out of memory: Killed process 1 (x) total-vm:1kB, anon-rss:{nines}kB
But your machine only has: []
node7:41:77 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC
node7:41:77 [0] NCCL INFO comm 0x55 rank 0 nranks 3000000000 cudaDev 0 busId 7000 commId 0x9 - Init COMPLETE
[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=600000)
CUDA out of memory. Tried to allocate {nines} GiB. GPU 99999 has a total capacity of 9.9.9 GiB of which 0 bytes is free.
DefaultCPUAllocator: can't allocate memory: you tried to allocate {nines} bytes
""".format(nines="9" * 400)


@each_case("line", [*GARBLED.splitlines(), GARBLED], ids=lambda line: line[:30])
def test_garbled_lines_break_nothing(line):
    assert not [result for result in examined(line) if result.status is Status.ERROR]


def ranks_of(report, cause):
    (result,) = (result for result in report.results if result.id == cause)
    return {rank for finding in result.findings for rank in finding.ranks}


WATCHDOG = (
    "[rank{rank}]:[E105 10:10:01.1 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600012 "
    "milliseconds before timing out."
)
FAILED = (
    "E0105 10:11:00 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {code}) local_rank: {rank} "
    "(pid: 4710) of binary: /usr/bin/python"
)


def test_a_rank_without_memory_explains_those_that_waited_for_it():
    lines = [
        "[rank3]: Traceback (most recent call last):",
        '[rank3]:   File "/home/me/train.py", line 57, in training_step',
        "[rank3]:     loss = self.model(batch)",
        '[rank3]:   File "/opt/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl',
        "[rank3]:     return forward_call(*args, **kwargs)",
        f"[rank3]: torch.OutOfMemoryError: {oom()}",
        *(WATCHDOG.format(rank=rank) for rank in (0, 1, 2)),
        FAILED.format(code=1, rank=3),
    ]
    report = examine(logged(*lines).job())
    assert report.primary == "MEM011"
    assert ranks_of(report, "MEM011") == {3}
    (result,) = (result for result in report.results if result.id == "MEM011")
    assert result.findings[0].evidence["place"] == "train.py:57 (training_step)"
    assert result.findings[0].evidence["cause"] == "demand"


def test_a_gpu_that_was_lost_explains_what_cuda_says_of_it():
    lines = [
        "[86400.5] NVRM: Xid (PCI:0000:b3:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "[86400.6] NVRM: Xid (PCI:0000:b3:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot)",
        "[rank5]: torch.AcceleratorError: CUDA error: unspecified launch failure",
        *(WATCHDOG.format(rank=rank) for rank in (0, 1, 2)),
    ]
    assert examine(logged(*lines).job()).primary == "GPU019"


def test_a_fault_in_the_watchdog_is_the_cause_and_not_a_stall():
    lines = [
        "[rank5]:[E105 10:00:01.1 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 5] Process group "
        "watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered",
        *(WATCHDOG.format(rank=rank) for rank in (0, 1, 2, 3, 4, 6, 7)),
        FAILED.format(code=-6, rank=5),
    ]
    report = examine(logged(*lines).job())
    assert report.primary == "GPU022"
    assert ranks_of(report, "GPU022") == {5}


def test_a_kernel_that_kills_explains_the_lost_peer():
    lines = [
        "[rank1]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited "
        "or there was a network error, NCCL version 2.21.5",
        "[rank1]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
        "prematurely.",
        FAILED.format(code=-9, rank=0),
        "slurmstepd: error: Detected 1 oom_kill event in StepId=42.0. Some of the step tasks have been OOM Killed.",
    ]
    assert examine(logged(*lines).job()).primary == "MEM012"


def test_a_full_shared_memory_explains_ncclsystemerror():
    lines = [
        "node7:41:77 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-1bDvqE to 33030276 bytes, "
        "error: No space left on device (28)",
        "[rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled system error (run "
        "with NCCL_DEBUG=INFO for details), NCCL version 2.21.5",
        "[rank0]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        "[rank0]: Last error:",
        "[rank0]: Error while creating shared memory segment /dev/shm/nccl-1bDvqE (size 33030272)",
    ]
    assert examine(logged(*lines).job()).primary == "MEM010"
