import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import BertForSequenceClassification, BertTokenizerFast, get_linear_schedule_with_warmup

from reviews import ReviewDataset


def save_model(model, tokenizer, folder):
    os.makedirs(folder, exist_ok=True)
    model = model.module if hasattr(model, "module") else model
    torch.save(model.state_dict(), os.path.join(folder, "pytorch_model.bin"))
    tokenizer.save_pretrained(folder)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="bert-reviews")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--per_gpu_batch_size", type=int, default=32)
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")
    tokenizer = BertTokenizerFast.from_pretrained("bert-base-uncased")
    model = BertForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=5).cuda()
    model = DistributedDataParallel(model, device_ids=[local_rank])
    dataset = ReviewDataset("train.tsv", tokenizer)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.per_gpu_batch_size, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    scheduler = get_linear_schedule_with_warmup(optimizer, 100, len(loader) * args.epochs)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = {key: value.cuda(non_blocking=True) for key, value in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            model.zero_grad()
        save_model(model, tokenizer, args.output_dir)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
