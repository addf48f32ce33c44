import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

from summaries import WikiHow


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = T5ForConditionalGeneration.from_pretrained("t5-large")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = FSDP(model, auto_wrap_policy=policy, mixed_precision=bf16, device_id=local_rank)

    data = WikiHow("train")
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2, pin_memory=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(2, device=local_rank)
        for batch in loader:
            batch = {key: value.to(local_rank) for key, value in batch.items()}
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach().float(), torch.ones((), device=local_rank)])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"Train epoch: {epoch}, loss: {(total[0] / total[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
