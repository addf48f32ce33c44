import argparse

import deepspeed
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft import ChatDataset


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--model_name", default="Qwen/Qwen2.5-1.5B")
    parser.add_argument("--data_path", default="chat.jsonl")
    parser.add_argument("--num_epochs", type=int, default=2)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = parse()
    deepspeed.init_distributed()
    torch.cuda.set_device(args.local_rank)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    model = AutoModelForCausalLM.from_pretrained(args.model_name, torch_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95))
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)
    dataset = ChatDataset(args.data_path, tokenizer)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, sampler=sampler, batch_size=engine.train_micro_batch_size_per_gpu())
    for epoch in range(args.num_epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = {key: value.to(engine.device) for key, value in batch.items()}
            loss = engine(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.save_checkpoint("checkpoints", tag=f"epoch{epoch}")


if __name__ == "__main__":
    main()
