#!/usr/bin/env python
import argparse
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, get_scheduler


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="google/flan-t5-large")
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", default="out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=4)
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate, log_with="tensorboard", project_dir=args.output)
    set_seed(1234)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model)
    train = load_from_disk(args.data)["train"]
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    loader = DataLoader(train, shuffle=True, collate_fn=collator, batch_size=args.batch)
    model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    steps = math.ceil(len(loader) / args.accumulate) * args.epochs
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=100, num_training_steps=steps)
    optimizer, loader, schedule = accelerator.prepare(optimizer, loader, schedule)

    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.wait_for_everyone()
        unwrapped = accelerator.unwrap_model(model)
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            unwrapped.save_pretrained(f"{args.output}/epoch_{epoch}", state_dict=state)
            tokenizer.save_pretrained(f"{args.output}/epoch_{epoch}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
