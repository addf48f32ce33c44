"""Canonical names of objects that libraries export under several names."""

from __future__ import annotations

_PREFIXES = {
    "pytorch_lightning": "lightning.pytorch",
    "lightning_fabric": "lightning.fabric",
    "torch.distributed.distributed_c10d": "torch.distributed",
    "torch.utils.data.distributed.DistributedSampler": "torch.utils.data.DistributedSampler",
    "torch.utils.data.dataloader.DataLoader": "torch.utils.data.DataLoader",
    "torch.utils.data.dataset.IterableDataset": "torch.utils.data.IterableDataset",
    "torch.utils.data.dataset.Dataset": "torch.utils.data.Dataset",
    "torch.nn.parallel.distributed.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.DataParallel": "torch.nn.DataParallel",
    "torch.nn.parallel.data_parallel.DataParallel": "torch.nn.DataParallel",
    "torch.serialization.load": "torch.load",
    "torch.cuda.memory.empty_cache": "torch.cuda.empty_cache",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "torch.distributed.fsdp.FullyShardedDataParallel"
    ),
    "torch.distributed._composable.fsdp.fully_shard": "torch.distributed.fsdp.fully_shard",
    "torch.cuda.amp.autocast_mode.autocast": "torch.cuda.amp.autocast",
    "lightning.pytorch.trainer.trainer.Trainer": "lightning.pytorch.Trainer",
    "lightning.pytorch.trainer.Trainer": "lightning.pytorch.Trainer",
    "lightning.pytorch.callbacks.callback.Callback": "lightning.pytorch.Callback",
    "lightning.pytorch.callbacks.Callback": "lightning.pytorch.Callback",
    "lightning.pytorch.core.LightningModule": "lightning.pytorch.LightningModule",
    "lightning.pytorch.core.module.LightningModule": "lightning.pytorch.LightningModule",
    "lightning.pytorch.core.lightning.LightningModule": "lightning.pytorch.LightningModule",
    "lightning.pytorch.core.LightningDataModule": "lightning.pytorch.LightningDataModule",
    "lightning.pytorch.utilities.rank_zero.rank_zero_only": "lightning.pytorch.utilities.rank_zero_only",
    "lightning.fabric.utilities.rank_zero.rank_zero_only": "lightning.pytorch.utilities.rank_zero_only",
    "lightning.fabric.utilities.rank_zero_only": "lightning.pytorch.utilities.rank_zero_only",
    "lightning_utilities.core.rank_zero.rank_zero_only": "lightning.pytorch.utilities.rank_zero_only",
    "accelerate.accelerator.Accelerator": "accelerate.Accelerator",
    "transformers.trainer.Trainer": "transformers.Trainer",
}
_OF_LIGHTNING = ("Trainer", "LightningModule", "LightningDataModule", "Callback", "seed_everything")
_PREFIXES |= {f"lightning.{name}": f"lightning.pytorch.{name}" for name in _OF_LIGHTNING}
_PREFIXES["lightning.Fabric"] = "lightning.fabric.Fabric"
_HEADS = {one.partition(".")[0] for one in _PREFIXES}
_LONGEST = max(one.count(".") for one in _PREFIXES) + 1


def canonical(name: str) -> str:
    """``name`` as rules know it: ``pytorch_lightning.Trainer`` is ``lightning.pytorch.Trainer``."""
    if name.partition(".")[0].partition("(")[0] not in _HEADS:
        return name
    for _ in range(3):
        parts = name.split(".")
        for count in range(min(len(parts), _LONGEST), 0, -1):
            head, rest = ".".join(parts[:count]), parts[count:]
            bare = head.rstrip("()")
            if bare in _PREFIXES:
                name = ".".join([_PREFIXES[bare] + head[len(bare) :], *rest])
                break
        else:
            break
    return name
