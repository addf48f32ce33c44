import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from chars import CharDataset
from gpt import GPT, create_optimizer


@dataclass
class TrainerConfig:
    max_epochs: int = 10
    batch_size: int = 216
    grad_norm_clip: float = 1.0
    snapshot_path: str = "gpt_snapshot.pt"
    save_every: int = 3


class Trainer:
    def __init__(self, config, model, optimizer, dataset):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=config.batch_size, pin_memory=True, sampler=self.sampler)
        self.model = model.to(self.local_rank)
        self.optimizer = optimizer
        self.epochs_run = 0
        if os.path.exists(config.snapshot_path):
            self._load_snapshot()
        self.model = DDP(self.model, device_ids=[self.local_rank])

    def _load_snapshot(self):
        snapshot = torch.load(self.config.snapshot_path)
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.epochs_run = snapshot["epoch"]

    def _run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        for x, y in self.loader:
            _, loss = self.model(x.to(self.local_rank), y.to(self.local_rank))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()

    def _save_snapshot(self, epoch):
        raw = self.model.module
        state = {"model": raw.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": epoch}
        torch.save(state, self.config.snapshot_path)

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            self._run_epoch(epoch)
            if self.global_rank == 0 and epoch % self.config.save_every == 0:
                self._save_snapshot(epoch)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl")
    torch.manual_seed(1)
    model = GPT(layers=8, heads=8, width=512)
    Trainer(TrainerConfig(), model, create_optimizer(model), CharDataset("input.txt")).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
