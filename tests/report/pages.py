"""Jobs whose reports are looked at: one that stalls, one of which only a log is left, and lines that nobody should
render."""

import random

import msgspec

from doctor.facts import (
    MemorySample,
    PathFacts,
    PathSample,
    PointInTime,
    ProgressFacts,
    Reach,
    ReachFacts,
    RecorderFacts,
    RunMemoryFacts,
    Transfer,
    TransferFacts,
)
from doctor.testing import logged, stalled, user_frame
from doctor.testing.cases import GIB
from doctor.testing.stalled_run import with_late_ranks
from doctor.testing.training_run import NOON

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> </script><!-- "
    "\x1b[31mred\x1b[0m \u202eevil {{7*7}} ![x](http://example.com/x.png) @somebody `` <b> `"
)
"""What a line of a log may hold."""
IDLE = 12.0


def stalled_job(hosts=2, per_host=4):
    """A job on GPUs that stands still because one rank does something else, watched for a while, and probed."""
    late = hosts * per_host // 3
    numbers = random.Random(1)
    sketch = stalled(hosts, per_host, gpus=per_host, idle=IDLE)
    sketch = with_late_ranks(sketch, (late,), user_frame(88, "log_images"), user_frame(42), point="step")
    for rank in range(hosts * per_host):
        sketch = sketch.alter(ProgressFacts, ranks=(rank,), recent=moments(numbers))
        sketch = sketch.alter(RunMemoryFacts, ranks=(rank,), samples=samples(numbers, grows=rank == late))
    sketch = sketch.alter(RecorderFacts, collectives=spread_out)
    return probed(sketch, hosts, per_host, numbers).job()


def moments(numbers):
    """Eight batches up to the moment at which it stood still."""
    at, passed = NOON - IDLE - 20, []
    for batch in range(33, 41):
        for point, seconds in (("data", 0.2), ("step", 0.6), ("backward", 1.2), ("optimizer", 0.3)):
            passed.append(PointInTime("train", point, batch, at))
            at += seconds * (1 + 0.1 * numbers.random())
    return tuple(moment for moment in passed if moment.at < NOON - IDLE)


def samples(numbers, *, grows):
    return tuple(
        MemorySample(
            step=step,
            allocated=int((20 + 0.08 * step * grows + numbers.random()) * GIB),
            reserved=int((30 + 0.1 * step * grows + numbers.random()) * GIB),
            resident=int((4 + 0.2 * numbers.random()) * GIB),
        )
        for step in range(0, 400, 2)
    )


def spread_out(calls):
    """The same collectives, some seconds apart, the last one when everything stood still."""
    first = NOON - IDLE - 2.3 * (len(calls) - 1)
    return tuple(
        msgspec.structs.replace(call, at=first + 2.3 * number, seconds=0.4 if call.retired else None)
        for number, call in enumerate(calls)
    )


def probed(sketch, hosts, per_host, numbers):
    names = [f"node{number}" for number in range(hosts)]
    for number, name in enumerate(names):
        others = [(other, peer) for other, peer in enumerate(names) if peer != name]
        paths = tuple(
            PathSample(
                peer=peer,
                address=f"10.0.0.{other + 1}",
                round_trip=1e-4 * (1 + 0.2 * numbers.random()),
                full_size_arrived=True,
            )
            for other, peer in others
        )
        sketch = sketch.put(PathFacts(samples=paths), hosts=(name,))
        sent = tuple(Transfer(peer, "done", 1.2e10 * (0.9 + 0.1 * numbers.random())) for _, peer in others)
        sketch = sketch.put(TransferFacts(samples=sent), hosts=(name,))
        tried = ReachFacts(
            attempts=tuple(Reach(peer, f"10.0.0.{other + 1}", 40000 + other, "open") for other, peer in others)
        )
        sketch = sketch.put(tried, ranks=range(number * per_host, (number + 1) * per_host))
    return sketch


def logged_job(*more, ranks=4, hostile=HOSTILE):
    """A job of which a log is left, in which the error of a rank holds what no page should render."""
    failed = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, internal error, "
    lines = [
        "node1:1003:1203 [1] bootstrap.cc:126 NCCL WARN Bootstrap : no socket interface found",
        *(f"[rank{rank}]: {failed}NCCL version 2.27.3 {hostile}" for rank in range(ranks)),
    ]
    return logged(*lines, *more).job()
