import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import BertForSequenceClassification, get_linear_schedule_with_warmup

from glue import load_features


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")
    data = load_features("mnli", "train")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, sampler=sampler, batch_size=32)
    model = BertForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=3).cuda()
    model = DDP(model, device_ids=[local_rank], output_device=local_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    scheduler = get_linear_schedule_with_warmup(optimizer, 500, 3 * len(loader))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            batch = tuple(tensor.cuda() for tensor in batch)
            loss = model(input_ids=batch[0], attention_mask=batch[1], labels=batch[2]).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            model.module.save_pretrained(f"mnli-{epoch}")


if __name__ == "__main__":
    main()
