import sys
import time

import torch
from omegaconf import OmegaConf
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from recipes.data import InstructDataset, padded_collate
from recipes.models import TransformerDecoder
from recipes.utils import get_device, get_logger, rank_and_world

log = get_logger("INFO")


class FullFinetuneRecipe:
    def __init__(self, cfg):
        self._device = get_device("cuda")
        self._dtype = torch.bfloat16
        self.rank, self.world_size = rank_and_world()
        self.total_epochs = cfg.epochs
        self.seed = cfg.seed
        self.global_step = 0

    def setup(self, cfg):
        self._model = self._setup_model(cfg.model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=cfg.lr, fused=True)
        self._sampler, self._dataloader = self._setup_data(cfg.dataset, cfg.batch_size)
        self._loss_fn = torch.nn.CrossEntropyLoss(ignore_index=-100)

    def _setup_model(self, cfg_model):
        with torch.device("meta"):
            model = TransformerDecoder(**cfg_model)
        policy = MixedPrecisionPolicy(param_dtype=self._dtype)
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        model.to_empty(device=self._device)
        model.init_weights()
        return model

    def _setup_data(self, cfg_dataset, batch_size):
        ds = InstructDataset(**cfg_dataset)
        sampler = DistributedSampler(ds, num_replicas=self.world_size, rank=self.rank, shuffle=True, seed=0)
        loader = DataLoader(dataset=ds, batch_size=batch_size, sampler=sampler, collate_fn=padded_collate, drop_last=True)
        return sampler, loader

    def train(self):
        self._optimizer.zero_grad()
        for epoch in range(self.total_epochs):
            self._sampler.set_epoch(epoch)
            for batch in self._dataloader:
                start = time.perf_counter()
                tokens, labels = batch["tokens"].to(self._device), batch["labels"].to(self._device)
                logits = self._model(tokens)
                loss = self._loss_fn(logits.flatten(0, 1), labels.flatten())
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm=1.0)
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
                self.global_step += 1
                if self.rank == 0 and self.global_step % 10 == 0:
                    log.info(f"step {self.global_step}: {loss.item():.3f} in {time.perf_counter() - start:.2f} s")

    def cleanup(self):
        destroy_process_group()


def recipe_main():
    cfg = OmegaConf.load(sys.argv[1])
    init_process_group(backend="cuda:nccl,cpu:gloo")
    recipe = FullFinetuneRecipe(cfg)
    recipe.setup(cfg)
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    recipe_main()
