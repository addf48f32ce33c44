import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM

from instructions import InstructionData, pad

ACCUMULATE = 8


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = AutoModelForCausalLM.from_pretrained("EleutherAI/pythia-410m").cuda()
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    data = InstructionData("alpaca.json")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler, collate_fn=pad, drop_last=True)
    model.train()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            batch = {name: value.cuda() for name, value in batch.items()}
            last = (step + 1) % ACCUMULATE == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(**batch).loss / ACCUMULATE
                loss.backward()
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            model.module.save_pretrained(f"pythia-alpaca-{epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
