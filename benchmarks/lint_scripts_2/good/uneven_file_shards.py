import glob
import itertools
import os

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from ctr import DeepFM


class ParquetStream(IterableDataset):
    def __init__(self, pattern, rank, world_size, batch_rows=4096):
        files = sorted(glob.glob(pattern))
        files = files[: len(files) - len(files) % world_size]
        self.files = files[rank::world_size]
        self.batch_rows = batch_rows

    def __iter__(self):
        for path in self.files:
            for batch in pq.ParquetFile(path).iter_batches(self.batch_rows):
                frame = batch.to_pandas()
                yield torch.tensor(frame.drop(columns="click").values), torch.tensor(frame["click"].values)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(DeepFM(fields=39).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    criterion = nn.BCEWithLogitsLoss()
    stream = ParquetStream("/data/criteo/day_*/part-*.parquet", rank, world_size)
    loader = DataLoader(stream, batch_size=None)
    steps = torch.tensor([len(stream.files) * 100], device="cuda")
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    for epoch in range(2):
        for features, clicks in itertools.islice(itertools.cycle(loader), steps.item()):
            optimizer.zero_grad()
            loss = criterion(model(features.cuda()).squeeze(1), clicks.float().cuda())
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save(model.module.state_dict(), f"deepfm_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
