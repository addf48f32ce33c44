import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import BertConfig, BertForMaskedLM

from pretraining import MaskedBlocks

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
}


def main():
    deepspeed.init_distributed("nccl")
    model = BertForMaskedLM(BertConfig())
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    data = MaskedBlocks("corpus", length=512)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=2, drop_last=True)

    step = 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = {name: value.to(engine.device) for name, value in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            step += 1
            if step % 1000 == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean, op=dist.ReduceOp.AVG)
                if dist.get_rank() == 0:
                    print(f"step {step}: {mean.item():.3f}")
                engine.save_checkpoint("checkpoints", client_state={"step": step})


if __name__ == "__main__":
    main()
