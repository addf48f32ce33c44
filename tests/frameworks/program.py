"""Small trainings of two ranks with each framework: ``python program.py FOLDER FRAMEWORK [FAULT]``.

Every rank leaves ``trace-RANK.json``: the output of the model and the state of all sources of random numbers in each
forward pass, and a digest of the parameters at the end; and ``modules-RANK.json``, the modules that it had imported at
its end. ``FAULT``, on rank 1: ``hang`` or ``crash`` in a forward pass
of training, whose time is noted in ``stopped``, or ``uneven``, a loader with one more batch.
"""

import atexit
import contextlib
import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

BATCHES, BATCH, WIDTH = 24, 4, 8
FAULT_IN = 9
"""The forward pass of the fault."""


class Trace:
    """What one rank computes, by hooks of torch on its model."""

    def __init__(self, folder, fault):
        self.folder, self.fault, self.values, self.calls = folder, fault, [], 0
        self.rank = int(os.environ.get("RANK", "0"))

    def watch(self, model):
        """Trace the forward passes of ``model``, which is not wrapped yet."""
        model.register_forward_pre_hook(self.enter)
        model.register_forward_hook(self.leave)
        return model

    def enter(self, model, given):
        """Cause the fault."""
        self.calls += model.training
        if self.rank != 1 or self.calls != FAULT_IN or self.fault not in ("hang", "crash"):
            return
        (self.folder / "stopped").write_text(repr(time.time()))
        if self.fault == "crash":
            raise ValueError("of rank 1")
        time.sleep(1000)

    def leave(self, model, given, output):
        """Write down an output."""
        output = (
            output
            if torch.is_tensor(output)
            else output["logits"]
            if output.get("logits") is not None
            else output["loss"]
        )
        numbers = (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().numpy().tobytes())
        self.values.append((float(output.detach().double().sum()).hex(), digest(repr(numbers).encode())))

    def write(self, model):
        """Write the trace of this rank, with the parameters that it holds."""
        parameters = [part(one, self.rank).detach().cpu().contiguous().view(torch.uint8) for one in model.parameters()]
        self.values.append(digest(b"".join(one.numpy().tobytes() for one in parameters)))
        (self.folder / f"trace-{self.rank}.json").write_text(json.dumps(self.values))
        self.write_modules()

    def write_modules(self):
        """Write what this rank has imported; once more at its end, because the doctor is at work until then."""
        if self.values:  # the driver of Ray has none
            (self.folder / f"modules-{self.rank}.json").write_text(json.dumps(sorted(sys.modules)))


def part(parameter, rank):
    """What this rank holds of a parameter, without the padding of DeepSpeed's parts, which is never written."""
    held = getattr(parameter, "ds_tensor", getattr(parameter, "_local_tensor", parameter)).reshape(-1)
    return held[: max(0, parameter.ds_numel - rank * len(held))] if hasattr(parameter, "ds_tensor") else held


def digest(content):
    """A short text for bytes."""
    return hashlib.sha256(content).hexdigest()[:16]


def seed(rank):
    """Other numbers on every rank."""
    for start in (random.seed, numpy.random.seed, torch.manual_seed):
        start(7 + rank)


class Rows(torch.utils.data.Dataset):
    """Rows that depend on all sources of random numbers."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.rand(WIDTH) + random.random() + float(numpy.random.random()) + index / self.count


def net():
    """Small, with dropout."""
    layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.3), torch.nn.Linear(WIDTH, 1)
    return torch.nn.Sequential(*layers)


def adam(model):
    """The optimizer."""
    return torch.optim.Adam(model.parameters(), lr=0.01)


def loader_of(trace, rows=None, collate=None):
    """A loader of this rank's half of the rows; the uneven one has a batch more."""
    from torch.utils.data import DataLoader, DistributedSampler

    rows = Rows(2 * BATCHES * BATCH) if rows is None else rows
    if trace.fault == "uneven":
        rows = [rows[index] for index in range(BATCH * (BATCHES + trace.rank))]
        return DataLoader(rows, BATCH, collate_fn=collate)
    return DataLoader(
        rows, BATCH, collate_fn=collate, sampler=DistributedSampler(rows, num_replicas=2, rank=trace.rank)
    )


def loop(model, optimizer, loader, backward=None):
    """Two epochs."""
    for epoch in range(2):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            loss = model(batch).square().mean() + random.random()
            backward(loss) if backward else loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def start(trace):
    """The process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seed(trace.rank)


def end(trace, model):
    """Leave the trace."""
    trace.write(model)
    dist.barrier()
    dist.destroy_process_group()


def ddp(trace):
    """DistributedDataParallel."""
    start(trace)
    model = torch.nn.parallel.DistributedDataParallel(trace.watch(net()))
    loop(model, adam(model), loader_of(trace))
    end(trace, model)


def late_rich(trace):
    """DistributedDataParallel in a program that imports rich, which draws from ``random``, after its seeds."""
    start(trace)
    model = torch.nn.parallel.DistributedDataParallel(trace.watch(net()))
    import rich.progress  # noqa: F401 - for what its import does

    loop(model, adam(model), loader_of(trace))
    end(trace, model)


def fsdp1(trace):
    """FullyShardedDataParallel."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    start(trace)
    model = FullyShardedDataParallel(trace.watch(net()), device_id=torch.device("cpu"))
    loop(model, adam(model), loader_of(trace))
    end(trace, model)


def fsdp2(trace):
    """fully_shard."""
    from torch.distributed.fsdp import fully_shard

    start(trace)
    model = trace.watch(net())
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (2,)))
    loop(model, adam(model), loader_of(trace))
    end(trace, model)


def accelerate(trace):
    """A loop that Accelerate prepared."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    set_seed(7 + trace.rank)
    model = trace.watch(net())
    loader = DataLoader(Rows(2 * BATCHES * BATCH), BATCH) if trace.fault != "uneven" else loader_of(trace)
    model, optimizer = accelerator.prepare(model, adam(model))
    if trace.fault != "uneven":
        loader = accelerator.prepare(loader)
    loop(model, optimizer, loader, accelerator.backward)
    end(trace, model)


def fabric(trace):
    """A loop that Fabric prepared."""
    from lightning.fabric import Fabric

    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    trace.rank = fabric.global_rank
    seed(trace.rank)
    model = trace.watch(net())
    model, optimizer = fabric.setup(model, adam(model))
    loader = fabric.setup_dataloaders(loader_of(trace), use_distributed_sampler=False)
    loop(model, optimizer, loader, fabric.backward)
    end(trace, model)


def lightning(trace):
    """Lightning's Trainer."""
    from lightning.pytorch import LightningModule, Trainer

    class Net(LightningModule):
        """The model of the other programs."""

        def __init__(self):
            super().__init__()
            self.net = trace.watch(net())

        def training_step(self, batch, number):
            """The loss."""
            return self.net(batch).square().mean() + random.random()

        def configure_optimizers(self):
            """The optimizer."""
            return adam(self)

    trace.rank = int(os.environ.get("LOCAL_RANK", "0"))  # of the launcher of the Trainer
    torch.set_num_threads(1)
    seed(trace.rank)
    model = Net()
    trainer = Trainer(
        max_epochs=2, devices=2, accelerator="cpu", strategy="ddp", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, default_root_dir=trace.folder, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(model, loader_of(trace))
    trace.write(model)


def transformers(trace):
    """The Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    class Net(torch.nn.Module):
        """The model of the other programs, as the Trainer calls it."""

        def __init__(self):
            super().__init__()
            self.net = trace.watch(net())

        def forward(self, rows=None):
            """The loss."""
            return {"loss": self.net(rows).square().mean() + random.random()}

    def collate(rows):
        return {"rows": torch.stack(list(rows))}

    torch.set_num_threads(1)
    arguments = TrainingArguments(
        str(trace.folder / "out"), use_cpu=True, num_train_epochs=2, report_to=[], save_strategy="no",
        per_device_train_batch_size=BATCH, seed=7, remove_unused_columns=False,
    )  # fmt: skip
    seed(trace.rank)
    model = Net()
    kind = _with_own_loader(Trainer, trace, collate) if trace.fault == "uneven" else Trainer
    kind(model, arguments, data_collator=collate, train_dataset=Rows(2 * BATCHES * BATCH)).train()
    trace.write(model)


def _with_own_loader(kind, trace, collate, rows=None):
    """The class of a Trainer that takes the loader of its program as it is."""
    return type("OwnLoader", (kind,), {"get_train_dataloader": lambda self: loader_of(trace, rows, collate)})


def language_model(trace):
    """A language model of 4,000 parameters, and a tokenizer of the letters, both made here."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz "]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1, attention_dropout=0.2,
    )  # fmt: skip
    torch.manual_seed(7)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    folder = trace.folder / f"model-{trace.rank}"  # DPO loads the model that it compares with from there
    LlamaForCausalLM(config).save_pretrained(folder)
    return trace.watch(LlamaForCausalLM.from_pretrained(folder)), wrapped


def trl_sft(trace):
    """SFTTrainer of TRL."""
    from trl import SFTConfig, SFTTrainer

    rows = [{"text": f"{'abcdefgh'[number % 8] * 8} {'mnop'[number % 4] * 6}"} for number in range(2 * BATCHES * BATCH)]
    _trl(trace, SFTTrainer, SFTConfig, rows)


def trl_dpo(trace):
    """DPOTrainer of TRL."""
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": "abcd"[number % 4] * 4, "chosen": "xyz"[number % 3] * 4, "rejected": "klm"[number % 3] * 4}
        for number in range(2 * BATCHES * BATCH)
    ]
    _trl(trace, DPOTrainer, DPOConfig, rows)


def _trl(trace, kind, config, rows):
    from datasets import Dataset

    torch.set_num_threads(1)
    model, tokenizer = language_model(trace)
    arguments = config(
        str(trace.folder / "out"), use_cpu=True, bf16=False, num_train_epochs=2, report_to=[], save_strategy="no",
        per_device_train_batch_size=BATCH, seed=7, max_length=32, gradient_checkpointing=False,
    )  # fmt: skip
    seed(trace.rank)
    trainer = kind(model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    if trace.fault == "uneven":
        own = loader_of(trace, trainer.train_dataset, trainer.data_collator)
        trainer.get_train_dataloader = lambda: own
    trainer.train()
    trace.write(model)


@contextlib.contextmanager
def watch_by_hand(trace, engine, loader):
    """Watch a loop as its program asks for; gives the loader, and what records a step."""
    import doctor

    with doctor.watch(dirpath=trace.folder / "doctor", every_n_steps=3) as watch:
        watch.model(engine)
        yield watch.loader(loader), watch.step


def deepspeed(trace, stage=1, edited=False):
    """An engine of DeepSpeed, with its own loader, which accumulates two batches."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    seed(trace.rank)
    model = trace.watch(net())
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    rows = None if trace.fault == "uneven" else Rows(2 * BATCHES * BATCH)
    engine, _, loader, _ = deepspeed.initialize(model=model, optimizer=adam(model), training_data=rows, config=config)
    if trace.fault == "uneven":
        loader = loader_of(trace)
    else:
        loader.num_local_io_workers = 0
    with (
        watch_by_hand(trace, engine, loader) if edited else contextlib.nullcontext((loader, None)) as (loader, stepped)
    ):
        for epoch in range(2):
            getattr(loader, "data_sampler", None) and loader.data_sampler.set_epoch(epoch)
            for batch in loader:
                loss = engine(batch).square().mean() + random.random()
                engine.backward(loss)
                engine.step()
                stepped and stepped(loss=loss)
    end(trace, engine)


def zero1(trace):
    """Stage 1 of ZeRO."""
    deepspeed(trace, 1)


def zero2(trace):
    """Stage 2 of ZeRO."""
    deepspeed(trace, 2)


def zero3(trace):
    """Stage 3 of ZeRO."""
    deepspeed(trace, 3)


def zero_edited(trace):
    """Stage 2, watched by the program itself."""
    deepspeed(trace, 2, edited=True)


def ray(trace):
    """TorchTrainer of Ray Train, whose workers are actors of Ray."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=80 * 2**20, _temp_dir=os.environ.get("RAY_HOME"))
    given = {"folder": str(trace.folder), "fault": trace.fault}
    TorchTrainer(
        ray_worker, train_loop_config=given, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(trace.folder / "ray")),
    ).fit()  # fmt: skip


def ray_worker(given):
    """The loop of one worker."""
    import ray.train.torch

    trace = Trace(Path(given["folder"]), given["fault"])
    trace.rank = ray.train.get_context().get_world_rank()
    os.chdir(trace.folder)
    torch.set_num_threads(1)
    seed(trace.rank)
    model = ray.train.torch.prepare_model(trace.watch(net()))
    loop(model, adam(model), loader_of(trace))
    trace.write(model)
    dist.barrier()


def torchtitan(trace):
    """The Trainer of torchtitan, with its model for debugging."""
    from torchtitan.models.llama3 import config_registry

    start(trace)
    trainer = config_registry.llama3_debugmodel().build()
    trainer.train()
    end(trace, trainer.model_parts[0])


def megatron(trace):
    """The groups and the wrapper of Megatron-LM, which ask for a device; its own optimizers and kernels need a GPU."""
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    start(trace)
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1, use_cpu_initialization=True)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), trace.watch(net()))
    model.broadcast_params()

    def backward(loss):
        loss.backward()
        model.finish_grad_sync()
        for one in model.parameters():
            one.grad = one.main_grad.clone()
        model.zero_grad_buffer()

    loop(model, adam(model), loader_of(trace), backward)
    end(trace, model)


FRAMEWORKS = {
    one.__name__: one
    for one in (
        ddp, late_rich, fsdp1, fsdp2, accelerate, fabric, lightning, transformers, trl_sft, trl_dpo, zero1, zero2,
        zero3, zero_edited, ray, torchtitan, megatron,
    )
}  # fmt: skip

if __name__ == "__main__":
    traced = Trace(Path(sys.argv[1]), (sys.argv[3:] or [""])[0])
    atexit.register(traced.write_modules)
    FRAMEWORKS[sys.argv[2]](traced)
