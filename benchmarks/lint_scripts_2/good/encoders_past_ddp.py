import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import utils
from pairs import CaptionedImages
from towers import ImageEncoder, TextEncoder


class DualEncoder(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.visual = ImageEncoder(width)
        self.textual = TextEncoder(width)
        self.temperature = nn.Parameter(torch.tensor(0.07))

    def encode_image(self, image):
        return F.normalize(self.visual(image), dim=-1)

    def encode_text(self, text):
        return F.normalize(self.textual(text), dim=-1)

    def forward(self, image, text):
        return self.encode_image(image), self.encode_text(text), self.temperature


def contrastive(image, text, temperature):
    logits = image @ text.t() / temperature
    labels = torch.arange(len(image), device=image.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def train(args):
    utils.init_distributed_mode(args)
    torch.cuda.set_device(args.gpu)
    model = DualEncoder().cuda()
    net = DistributedDataParallel(model, device_ids=[args.gpu])
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    dataset = CaptionedImages(args.annotations)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, num_workers=6, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for image, text in loader:
            image, text = image.cuda(non_blocking=True), text.cuda(non_blocking=True)
            image_features, text_features, temperature = net(image, text)
            loss = contrastive(image_features, text_features, temperature)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if utils.is_main_process():
            torch.save(model.state_dict(), f"{args.output}/{epoch:03d}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--annotations", default="captions.json")
    parser.add_argument("--output", default="runs")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=32)
    train(parser.parse_args())
