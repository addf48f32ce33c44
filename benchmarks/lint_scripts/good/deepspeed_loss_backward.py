import argparse

import deepspeed
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer


class Texts(Dataset):
    def __init__(self, path, tokenizer, length=512):
        with open(path) as file:
            ids = tokenizer(file.read())["input_ids"]
        self.blocks = [ids[i : i + length] for i in range(0, len(ids) - length, length)]

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return torch.tensor(self.blocks[index])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--model", default="facebook/opt-1.3b")
    parser.add_argument("--text", default="corpus.txt")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    model_engine, optimizer, loader, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        training_data=Texts(args.text, tokenizer),
    )
    for epoch in range(3):
        for step, ids in enumerate(loader):
            ids = ids.to(model_engine.device)
            loss = model_engine(input_ids=ids, labels=ids).loss
            model_engine.backward(loss)
            model_engine.step()
            if step % 50 == 0 and model_engine.global_rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f}")
        model_engine.save_checkpoint("checkpoints", tag=f"epoch{epoch}")


if __name__ == "__main__":
    main()
