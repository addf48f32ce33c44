"""A Trainer that nobody gave a callback, or whose program has its own: ``python trainer.py FOLDER FRAMEWORK [own]``.

With ``hangs``, rank 1 waits for a lock after its Trainer has returned, while the others wait for it in a barrier.
"""

import sys
import threading
from pathlib import Path

import torch

folder, framework, own = Path(sys.argv[1]), sys.argv[2], sys.argv[3:] == ["own"]
hangs = sys.argv[3:] == ["hangs"]


def meet(rank):
    """Meet after the training, if rank 1 gets there."""
    if hangs:
        lock = threading.Lock()
        with lock:
            if rank == 1:
                lock.acquire()
        torch.distributed.barrier()


def transformers():
    """Hugging Face's, on the ranks of torchrun."""
    from transformers import Trainer, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, x=None, labels=None):
            logits = self.layer(x)
            return {"loss": (logits - labels).square().mean(), "logits": logits}

    rows = [{"x": torch.ones(8), "labels": torch.ones(1)} for _ in range(32)]
    arguments = TrainingArguments(str(folder / "out"), use_cpu=True, num_train_epochs=1, report_to=[])
    callbacks = []
    if own:
        from doctor import HFDoctorCallback

        callbacks.append(HFDoctorCallback(folder / "own"))
    trainer = Trainer(Net(), arguments, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)
    before = list(trainer.callback_handler.callbacks)
    trainer.train()
    meet(arguments.process_index)
    trainer.evaluate()
    assert trainer.callback_handler.callbacks == before


def lightning(package):
    """Lightning's of either package, with ranks that it starts itself."""
    from importlib import import_module

    pl = import_module(package)
    from torch.utils.data import DataLoader

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch, number):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    callbacks = []
    if own:
        from doctor import DoctorCallback

        callbacks.append(DoctorCallback(folder / "own"))
    trainer = pl.Trainer(
        max_epochs=1, devices=2, accelerator="cpu", strategy="ddp", logger=False, enable_progress_bar=False,
        default_root_dir=folder / "out", callbacks=callbacks,
    )  # fmt: skip
    names = [type(one).__name__ for one in trainer.callbacks]
    assert names.count("DoctorCallback") == 1, names
    assert names[-1] == "ModelCheckpoint"
    trainer.fit(Net(), DataLoader(torch.ones(32, 8), 4))
    meet(trainer.global_rank)


if __name__ == "__main__":
    if framework == "transformers":
        transformers()
    else:
        lightning(framework)
