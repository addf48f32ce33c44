"""Knowledge distillation: teachers on the even ranks, students on the odd ones."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from distill import Student, load_teacher, token_batches

VOCABULARY = 32000


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    students = list(range(1, world_size, 2))
    student_group = dist.new_group(students)

    if rank % 2 == 0:
        teacher = load_teacher("teacher.pt").cuda().eval()
        for tokens in token_batches(rank // 2, world_size // 2):
            with torch.no_grad():
                logits = teacher(tokens.cuda())
            dist.send(logits, dst=rank + 1)
    else:
        model = DDP(Student(VOCABULARY).cuda(), device_ids=[local_rank], process_group=student_group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for tokens in token_batches(rank // 2, world_size // 2):
            target = torch.empty(*tokens.shape, VOCABULARY, device="cuda")
            dist.recv(target, src=rank - 1)
            output = model(tokens.cuda())
            loss = F.kl_div(output.log_softmax(-1), target.softmax(-1), reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 1:
            torch.save(model.module.state_dict(), "student.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
