import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, random_split
from torchvision import transforms
from torchvision.datasets import CIFAR100
from torchvision.models import wide_resnet50_2


class CIFARModule(pl.LightningDataModule):
    def __init__(self, root="./data", batch_size=128):
        super().__init__()
        self.root, self.batch_size = root, batch_size
        self.transform = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.ToTensor()])

    def prepare_data(self):
        CIFAR100(self.root, train=True, download=True)
        CIFAR100(self.root, train=False, download=True)

    def setup(self, stage=None):
        full = CIFAR100(self.root, train=True, transform=self.transform)
        self.test = CIFAR100(self.root, train=False, transform=transforms.ToTensor())
        generator = torch.Generator().manual_seed(42)
        self.train, self.val = random_split(full, [45000, 5000], generator=generator)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, num_workers=4)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size, num_workers=4)


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = wide_resnet50_2(num_classes=100)

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)


if __name__ == "__main__":
    pl.seed_everything(1)
    pl.Trainer(accelerator="gpu", devices=8, strategy="ddp", max_epochs=200).fit(Classifier(), CIFARModule())
