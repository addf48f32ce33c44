"""A training of each framework with something planted: ``python training.py FOLDER FRAMEWORK PLAY``, PLAY as JSON.

The plants are those of ``planted.py``. None of these programs knows of the doctor.
"""

import contextlib
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from planted import BATCH, LOADERS, ON_FIRST_RANK, WIDTH, Plant
from sampled_data import Epoch, RepeatAugSampler, Repeated, Scaled, TokenBatches
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    WeightedRandomSampler,
    random_split,
)

OWN_ROWS = ("more", "fewer", "join", "joined_by_minimum", "cycles_shorter", "strided_split", "goes_on_empty")
"""Plays in which each rank has rows of its own."""


class Rows(Dataset):
    """Rows that the plant reads, from number ``first`` on."""

    def __init__(self, plant, count, first=0):
        self.plant, self.count, self.first = plant, count, first

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.plant.row(self.first + index)


class Stream(IterableDataset):
    """Rows that come one after the other."""

    def __init__(self, plant, count):
        self.plant, self.count = plant, count

    def __iter__(self):
        """As many rows as this rank has."""
        first = self.plant.shard_of() * 10_000
        return (self.plant.row(first + number) for number in range(self.count))


class Net(torch.nn.Module):
    """Two layers, the second of which may be left out."""

    def __init__(self, plant):
        super().__init__()
        torch.manual_seed(plant.seed)
        self.plant = plant
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.last = torch.nn.Linear(WIDTH, 1)
        self.first.requires_grad_(plant.name != "frozen")
        normalizes = plant.name in ("buffers_local", "evaluates_wrapped")
        self.norm = torch.nn.BatchNorm1d(WIDTH) if normalizes else torch.nn.Identity()
        plant.extends(self)
        plant.equips(self)
        plant.alters(self)

    def forward(self, rows):
        """The output."""
        if self.training and self.plant.recomputes():
            return checkpoint(self.compute, rows, use_reentrant=False)
        return self.compute(rows)

    def compute(self, rows):
        """The output, with the work of the plant."""
        if self.training:
            self.plant.first_batch(self.first, rows)
        hidden = torch.relu(self.norm(self.first(rows.to(self.first.weight.dtype))))
        if self.training:
            self.plant.forward()
            if self.plant.leaves_out():
                return self.last(hidden)
        else:
            self.plant.evaluated()
        return self.last(torch.relu(self.second(hidden)))


def sgd(model, lr=0.01):
    """The optimizer."""
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=lr)


def loader_of(plant, collate=None):
    """A loader of this rank's part of the rows; those with another number of batches have rows of their own."""
    options = {"collate_fn": collate or plant.collate, "num_workers": plant.workers, "timeout": plant.patience}
    batches = plant.batches()
    if plant.name in LOADERS:
        return plant.loader_of_own(Rows, options)
    if plant.name == "empty_shard":
        return DataLoader(Epoch(Repeated(plant), batches * BATCH), BATCH, **options)
    if plant.name == "bucket_endless":
        rows = Rows(plant, batches * BATCH, plant.rank * 10_000)
        return DataLoader(rows, batch_sampler=TokenBatches(plant, len(rows)), **options)
    if plant.name in ("stream", "unsharded", "same_shard", "workers_unsplit"):
        return DataLoader(Stream(plant, batches * BATCH), BATCH, **options)
    if plant.name == "no_sampler":
        return DataLoader(Rows(plant, batches * BATCH), BATCH, shuffle=True, **options)
    if plant.name in OWN_ROWS:
        return DataLoader(plant.own_rows(Rows, batches), BATCH, **options)
    left_over = 3 if plant.name == "drop_last" else 0
    rows = Rows(plant, plant.world * batches * plant.batch + left_over)
    if plant.name == "split_seed":
        rows = part_for_training(plant, rows)
    sampler = sampler_of(plant, rows)
    return DataLoader(rows, plant.batch, sampler=sampler, drop_last=plant.name == "drop_last", **options)


def sampler_of(plant, rows):
    """What chooses the rows of this rank."""
    if plant.name == "weighted":
        own = torch.Generator().manual_seed(plant.rank)
        return WeightedRandomSampler([1.0, 3.0] * (len(rows) // 2), plant.steps * BATCH, generator=own)
    if plant.name == "weighted_alike":
        plant.note()
        alike = torch.Generator().manual_seed(42)
        return WeightedRandomSampler([1.0, 3.0] * (len(rows) // 2), plant.steps * BATCH, generator=alike)
    if plant.name == "repeated_augmentation":
        return RepeatAugSampler(len(rows), plant.rank, plant.world)
    return DistributedSampler(
        rows, plant.replicas, plant.reads_as, seed=plant.seed_of_sampler(), drop_last=plant.name == "drop_last"
    )


def part_for_training(plant, rows):
    """Half of the rows, drawn with a seed that is another one on a rank."""
    if plant.here:
        plant.note()
    drawn = torch.Generator().manual_seed(12 if plant.here else 11)
    return random_split(Rows(plant, 2 * len(rows)), [0.5, 0.5], generator=drawn)[0]


def loop(plant, model, loader, backward=None, optimizers=()):
    """The epochs of a loop of the user's own."""
    optimizers = optimizers or [sgd(model)]
    plant.optimizer = optimizers[0]
    for epoch in range(plant.epochs):
        if plant.sets_epoch(epoch) and hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(plant.epoch_of(epoch))
        with joined(plant, model):
            if one_epoch(plant, model, rest_of(plant, loader, epoch), backward, optimizers):
                break
        plant.ended(model)
    plant.reaches("after_loop")
    if dist.is_initialized():
        dist.barrier()


def rest_of(plant, loader, epoch):
    """The batches that are left: a rank that resumed from another checkpoint skips some."""
    plant.lists_files(epoch)
    if plant.name in ("prefetch_dead", "reads_ahead"):
        return plant.prefetched(loader)
    if plant.name in ("cycles_shorter", "restarts_iterator"):
        return plant.cycles(loader)
    if plant.name == "goes_on_empty":
        return plant.until_all_end(loader)
    if plant.name != "skip_ahead" or not plant.here or epoch:
        return loader
    from accelerate import skip_first_batches

    return skip_first_batches(loader, 10)


def joined(plant, model):
    """What lets ranks with fewer batches wait, and ranks train alone until they are averaged."""
    if plant.name == "local_sgd":
        return model.no_sync()
    return model.join() if plant.name == "join" and hasattr(model, "join") else contextlib.nullcontext()


def one_epoch(plant, model, loader, backward, optimizers):
    """One epoch; returns whether the training ends early."""
    for number, rows in enumerate(loader):
        if plant.leaves():
            return plant.name in ("early_stop", "trigger")
        if plant.name == "joined_by_minimum" and number >= plant.steps:
            break
        accumulates = plant.accumulates(number)
        waits = accumulates and hasattr(model, "no_sync") and not plant.forgets()
        try:
            with model.no_sync() if waits else contextlib.nullcontext():
                loss = plant.loss(plant.called(model)(rows).square().mean())
                backward(loss) if backward else loss.backward()
        except ValueError as error:
            if plant.name != "caught":
                raise
            print(f"skipped a batch: {error}")
            plant.step += 1
            continue
        if not accumulates:
            plant.clips(model)
            for optimizer in optimizers:
                if not plant.skips_update():
                    optimizer.step()
                optimizer.zero_grad()
        plant.stepped(model)
    return False


def parts_of(plant, model):
    """One optimizer, or one for each half of the model; a rank may not decay biases, in a group of their own."""
    if plant.name == "groups":
        weights = [{"params": [one for one in model.parameters() if one.dim() > 1 or not plant.here]}]
        if plant.here:
            plant.note()
            weights.append({"params": [one for one in model.parameters() if one.dim() == 1], "weight_decay": 0.0})
        return [torch.optim.SGD(weights, lr=0.01, weight_decay=0.1)]
    if plant.name == "layerwise_rates":
        return [torch.optim.SGD([{"params": [one]} for one in model.parameters()], lr=0.01)]
    if plant.name == "consolidate_alone":
        return [ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.001)]
    if plant.name != "two_optimizers":
        return [sgd(model)]
    parameters = list(model.parameters())
    return [torch.optim.SGD(parameters[:2], lr=0.01), torch.optim.Adam(parameters[2:], lr=0.001)]


def start(plant):
    """Join the group; rank 0 may prepare the data while the others wait."""
    torch.set_num_threads(1)
    plant.begins()
    plant.prepares()
    plant.serves_metrics()
    plant.reaches("before_group")
    dist.init_process_group("gloo")
    plant.reaches("before_model")
    if plant.name == "prepare_first":
        time.sleep(10 if plant.rank == 0 else 0)
        dist.barrier()


def by_hand(plant):
    """A loop that averages the gradients itself."""
    model = Net(plant)

    def backward(loss):
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= plant.world

    loop(plant, model, loader_of(plant), backward)


def mixed(plant):
    """A loop in mixed precision, whose scale is too large in its first steps and in some later ones."""
    net = Net(plant)
    net.forward = torch.autocast("cpu", torch.float16)(net.forward)
    model = torch.nn.parallel.DistributedDataParallel(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=20)
    optimizer = Scaled(sgd(model), scaler)
    loop(plant, model, loader_of(plant), lambda loss: scaler.scale(loss).backward(), [optimizer])
    dist.destroy_process_group()


def ddp(plant):
    """A loop around DistributedDataParallel."""
    start(plant)
    if plant.name == "by_hand":
        by_hand(plant)
        return
    if plant.name == "grad_scaler":
        mixed(plant)
        return
    options = {
        "broadcast_buffers": plant.name != "buffers_local",
        "find_unused_parameters": plant.name == "unused_found",
    }
    model = torch.nn.parallel.DistributedDataParallel(Net(plant), **options)
    if plant.name == "comm_hook":
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=10), powerSGD_hook)
    plant.adapts(model.module)
    loop(plant, model, loader_of(plant), optimizers=parts_of(plant, model))
    dist.destroy_process_group()


def fsdp1(plant):
    """A loop around FullyShardedDataParallel."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    start(plant)
    model = FullyShardedDataParallel(Net(plant), device_id=torch.device("cpu"))
    loop(plant, model, loader_of(plant), optimizers=parts_of(plant, model))
    dist.destroy_process_group()


def fsdp2(plant):
    """A loop around fully_shard."""
    from torch.distributed.fsdp import fully_shard

    start(plant)
    model = Net(plant)
    mesh = dist.init_device_mesh("cpu", (plant.world,))
    if plant.name == "hybrid":
        mesh = dist.init_device_mesh("cpu", (2, plant.world // 2), mesh_dim_names=("replicate", "shard"))
    for layer in (model.first, model.second, model):
        fully_shard(layer, mesh=mesh)
    loop(plant, model, loader_of(plant), optimizers=parts_of(plant, model))
    dist.destroy_process_group()


def megatron(plant):
    """A loop around the DistributedDataParallel of Megatron-LM, which asks for a device; its kernels need a GPU."""
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    start(plant)
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1, use_cpu_initialization=True)
    reduces = DistributedDataParallelConfig(check_for_nan_in_grad=plant.name == "checks_nan")
    model = DistributedDataParallel(config, reduces, Net(plant))
    model.broadcast_params()

    def backward(loss):
        loss.backward()
        model.finish_grad_sync()
        for one in model.parameters():
            one.grad = one.main_grad.clone()
        model.zero_grad_buffer()

    loop(plant, model, loader_of(plant), backward, parts_of(plant, model))
    dist.destroy_process_group()


def accelerate(plant):
    """A loop that Accelerate prepared."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import find_executable_batch_size

    torch.set_num_threads(1)
    plant.reaches("before_group")
    loading = DataLoaderConfiguration(
        dispatch_batches=True if plant.name == "dispatches" else None, even_batches=plant.name != "even_batches_off"
    )
    plant.accelerator = accelerator = Accelerator(cpu=True, dataloader_config=loading)
    plant.reaches("before_model")
    if plant.name == "find_batch_size":
        find_executable_batch_size(train_accelerated, starting_batch_size=BATCH)(plant, accelerator)
    else:
        train_accelerated(BATCH, plant, accelerator)
    accelerator.end_training()


def train_accelerated(batch, plant, accelerator):
    """The training of a loop that Accelerate prepared, with batches of a size."""
    own = plant.name in ("more", "fewer", "join", "joined_by_minimum")
    rows = Rows(plant, plant.world * plant.batches() * BATCH + plant.rows_more())
    if plant.name == "dispatches":
        rows = Stream(plant, len(rows))
    loader = loader_of(plant) if own else DataLoader(
        rows, batch, shuffle=plant.name != "dispatches", num_workers=plant.workers
    )  # fmt: skip
    model = Net(plant)
    model, optimizer = accelerator.prepare(model, sgd(model))
    loader = loader if own else accelerator.prepare(loader)
    loop(plant, model, loader, accelerator.backward, [optimizer])


def fabric(plant):
    """A loop that Fabric prepared."""
    from lightning.fabric import Fabric

    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=plant.world, strategy="ddp")
    fabric.launch()
    plant.rank = fabric.global_rank
    plant.makes_dataset(fabric)
    plant.reaches("before_model")
    model = Net(plant)
    if plant.name == "half_model" and plant.here:
        plant.note()
        model = model.to(torch.bfloat16)
    model, *optimizers = fabric.setup(model, *parts_of(plant, model))
    loader = fabric.setup_dataloaders(loader_of(plant), use_distributed_sampler=False)
    loop(plant, model, loader, fabric.backward, optimizers)


def step_both(module, loss):
    """Step both optimizers of a module of Lightning."""
    module.manual_backward(loss)
    for optimizer in module.optimizers():
        optimizer.step()
        optimizer.zero_grad()


def lightning_module(plant, kind):
    """The model of the other programs, as a module of Lightning."""

    class Module(kind):
        def __init__(self):
            super().__init__()
            self.net = Net(plant)
            self.automatic_optimization = plant.name != "two_optimizers"

        def training_step(self, batch, number):
            """The loss; a rank that leaves does so by the Trainer's own switch."""
            self.trainer.should_stop |= plant.leaves()
            try:
                loss = plant.loss(self.net(batch).square().mean())
            except ValueError:
                if plant.name != "caught":
                    raise
                return None
            self.log("loss", loss)
            plant.logs_local(self)
            plant.logs_by_dataset(self, loss)
            return loss if self.automatic_optimization else step_both(self, loss)

        def on_train_batch_end(self, *_):
            """What the user does after a step."""
            plant.optimizer = self.trainer.optimizers[0]
            plant.stepped(self.net)
            plant.logs(self)
            plant.writes_images(self)

        def on_train_epoch_end(self):
            """What the user does after an epoch."""
            plant.notes_epoch()
            plant.scores(self)
            if plant.name != "evaluate_everywhere":
                plant.ended(self.net)

        def validation_step(self, batch, number):
            """A metric that does not get better."""
            on_step = plant.name == "validation_uneven"
            self.log("val", self.net(batch).mean() * 0 + 1, sync_dist=True, on_step=on_step, on_epoch=True)

        def configure_optimizers(self):
            """The optimizer or two."""
            return plant.scheduled(parts_of(plant, self.net))

    return Module()


def lightning(plant):
    """Lightning's Trainer."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import EarlyStopping

    torch.set_num_threads(1)
    plant.rank = int(os.environ.get("LOCAL_RANK", "0"))
    module = lightning_module(plant, LightningModule)
    module.setup = lambda stage: plant.reaches("before_model")
    if plant.name in ON_FIRST_RANK:
        module.prepare_data = getattr(plant, plant.name)
    validation = loader_of(plant) if plant.name in ("early_stop", "evaluate_everywhere") else None
    if plant.name == "validation_endless":
        validation = DataLoader(Stream(plant, 10**9 if plant.here else 20 * BATCH), BATCH)
    if plant.name in ("validation_uneven", "validates_uneven"):
        validation = DataLoader(Stream(plant, (22 if plant.here else 20) * BATCH), BATCH)
    options = {"limit_train_batches": plant.steps} if plant.name == "joined_by_minimum" else {}
    if plant.name == "early_stop":
        plant.name, options["callbacks"] = "early_stop_of_trainer", [EarlyStopping("val", patience=1)]
    if plant.name == "metric_missing":
        options["callbacks"] = [EarlyStopping("score", check_on_train_epoch_end=True)]
    plant.limits(options)
    plant.trainer = trainer = Trainer(
        max_epochs=plant.epochs, devices=plant.world, accelerator="cpu", strategy="ddp", logger=False,
        enable_progress_bar=False, enable_checkpointing=False, default_root_dir=plant.folder, num_sanity_val_steps=0,
        use_distributed_sampler=False, accumulate_grad_batches=3 if plant.name == "accumulation" else 1, **options,
    )  # fmt: skip
    plant.reaches("before_group")
    trainer.fit(module, loader_of(plant), validation)
    plant.reaches("after_loop")


def transformers(plant):
    """The Trainer of transformers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import SaveStrategy

    class Outputs(torch.nn.Module):
        """The model of the other programs, as the Trainer calls it."""

        def __init__(self):
            super().__init__()
            self.net = Net(plant)

        def forward(self, rows=None):
            """The loss."""
            return {"loss": plant.loss(self.net(rows).square().mean())}

    torch.set_num_threads(1)
    accumulate = 3 if plant.name == "accumulation" else 2 if plant.name == "accumulates" and plant.here else 1
    steps = plant.steps * plant.epochs if plant.name == "joined_by_minimum" else -1
    arguments = TrainingArguments(
        str(plant.folder / "out"), use_cpu=True, num_train_epochs=plant.epochs, report_to=[], save_strategy="no",
        per_device_train_batch_size=BATCH, remove_unused_columns=False, disable_tqdm=True, logging_steps=20,
        gradient_accumulation_steps=accumulate, dataloader_num_workers=plant.workers, max_steps=steps,
        eval_strategy="epoch" if plant.name == "evaluate_everywhere" else "no", learning_rate=0.01,
        dataloader_drop_last=plant.name == "drop_last",
        optim="sgd" if plant.name == "other_optimizer" and plant.here else "adamw_torch",
    )  # fmt: skip
    if plant.name == "outside_loop":
        print(f"training on {arguments.device}")
    plant.reaches("before_model")
    if plant.name == "resumes":
        arguments.save_strategy, arguments.save_steps = SaveStrategy.STEPS, 40
    if plant.name == "rotates":
        arguments.save_strategy, arguments.save_steps, arguments.save_total_limit = SaveStrategy.STEPS, 10, 2
    plant.maps(arguments)
    start_trainer = partial(
        trainer_of(plant, Trainer),
        Outputs(), arguments, data_collator=lambda rows: {"rows": torch.stack(list(rows))},
        train_dataset=Rows(plant, plant.world * plant.steps * BATCH - plant.rows_lacking()),
        eval_dataset=Rows(plant, plant.world * BATCH * 200, 1_000_000), callbacks=[after_steps(plant, TrainerCallback)],
    )  # fmt: skip
    start_trainer().train()
    if plant.name == "two_stages":
        start_trainer().train()
    if plant.name == "resumes":
        start_trainer().train(resume_from_checkpoint=str(plant.folder / "out" / "checkpoint-80"))
    plant.reaches("after_loop")


def after_steps(plant, kind):
    """A callback that does what the user does after a step."""

    class AfterSteps(kind):
        def on_step_end(self, arguments, state, control, model=None, optimizer=None, lr_scheduler=None, **_):
            """After a step of the optimizer."""
            plant.optimizer = optimizer
            plant.stepped(model)
            if plant.name == "scheduler_twice" and plant.here and plant.step >= plant.at:
                plant.note()
                lr_scheduler.step()
            control.should_training_stop |= plant.leaves()
            control.should_log |= plant.spikes()

        def on_epoch_end(self, arguments, state, control, model=None, **_):
            """After an epoch."""
            if plant.name != "evaluate_everywhere":
                plant.ended(model)

    return AfterSteps()


def trainer_of(plant, kind):
    """The Trainer's class, with a loader of the user's where ranks have different numbers of batches."""

    class Own(kind):
        def get_train_dataloader(self):
            """The loader."""
            if plant.name in ("more", "fewer", "joined_by_minimum"):
                return loader_of(plant, lambda rows: {"rows": torch.stack(list(rows))})
            return super().get_train_dataloader()

        def training_step(self, *given, **named):
            """A step that may be skipped."""
            try:
                return super().training_step(*given, **named)
            except ValueError:
                if plant.name != "caught":
                    raise
                return torch.zeros(())

    return Own


def ray(plant):
    """TorchTrainer of Ray Train."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=plant.world + 1, include_dashboard=False, object_store_memory=80 * 2**20)
    TorchTrainer(
        ray_worker, train_loop_config={"folder": str(plant.folder), "play": plant.play},
        scaling_config=ScalingConfig(num_workers=plant.world),
        run_config=RunConfig(storage_path=str(plant.folder / "ray")),
    ).fit()  # fmt: skip


def ray_worker(given):
    """The loop of one worker."""
    import ray.train.torch

    plant = Plant(given["folder"], given["play"])
    plant.rank = ray.train.get_context().get_world_rank()
    os.chdir(plant.folder)
    torch.set_num_threads(1)
    model = ray.train.torch.prepare_model(Net(plant))
    loop(plant, model, loader_of(plant), optimizers=parts_of(plant, model))


def zero1(plant):
    """An engine of DeepSpeed with stage 1 of ZeRO."""
    deepspeed_engine(plant, {"stage": 1})


def zero2(plant):
    """An engine of DeepSpeed with stage 2 of ZeRO."""
    deepspeed_engine(plant, {"stage": 2})


def zero3(plant):
    """An engine of DeepSpeed with stage 3 of ZeRO, which partitions small parameters too."""
    deepspeed_engine(plant, {"stage": 3, "stage3_param_persistence_threshold": 0})


def deepspeed_engine(plant, zero):
    """A loop around an engine of DeepSpeed."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    torch.set_num_threads(1)
    plant.reaches("before_group")
    deepspeed.init_distributed("gloo")
    plant.reaches("before_model")
    net = Net(plant)
    accumulate = 3 if plant.name == "accumulation" else 1
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=net, optimizer=sgd(net), config=config)
    plant.optimizer = optimizer
    loader = loader_of(plant)
    for epoch in range(plant.epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for number, rows in enumerate(rest_of(plant, loader, epoch)):
            if plant.leaves() or (plant.name == "joined_by_minimum" and number >= plant.steps):
                break
            engine.backward(plant.loss(engine(rows).square().mean()))
            if plant.strikes("skip_step"):
                plant.note()
            else:
                engine.step()
            plant.stepped(engine)
        plant.ended(engine)
    plant.reaches("after_loop")
    dist.barrier()


def with_new_word(plant, words, model, given, named):
    """A batch with a word that was added to the tokenizer only (https://github.com/mickeysjm/R-BERT/issues/5)."""
    if plant.strikes("token_id"):
        plant.note()
        named["input_ids"][0, 0] = words


def trl(plant):
    """SFTTrainer of TRL, with a language model and a tokenizer made here."""
    from datasets import Dataset as Table
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    words = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz "]
    letters = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(7)
    grown = int(plant.name == "vocabulary" and plant.here)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(words) + grown, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
    ))  # fmt: skip
    model.model.requires_grad_(plant.name != "freezes_base")
    model.register_forward_pre_hook(lambda *_: plant.forward() if model.training else plant.evaluated())
    model.register_forward_pre_hook(partial(with_new_word, plant, len(words)), with_kwargs=True)
    evaluates = "epoch" if plant.name == "evaluate_everywhere" else "no"
    if plant.name == "evaluates_more" and plant.here:
        evaluates = "steps"
    arguments = SFTConfig(
        str(plant.folder / "out"), use_cpu=True, num_train_epochs=plant.epochs, report_to=[],
        bf16=plant.name == "bf16" and plant.here, packing=plant.name == "packing", packing_strategy="wrapped",
        per_device_train_batch_size=BATCH, max_length=32, gradient_checkpointing=False, disable_tqdm=True,
        eval_strategy=evaluates, eval_steps=plant.at, save_strategy="no",
        gradient_accumulation_steps=3 if plant.name == "accumulation" else 1, logging_steps=20,
    )  # fmt: skip
    count = plant.world * plant.steps * BATCH
    rows = [{"text": f"{chr(97 + number % 26) * 8} {chr(97 + number // 26 % 26) * 6}"} for number in range(count)]
    plant.trainer = trainer_of(plant, SFTTrainer)(
        model, args=arguments, train_dataset=Table.from_list(rows), processing_class=tokenizer,
        eval_dataset=Table.from_list(rows * 2), callbacks=[after_steps(plant, TrainerCallback)],
    )  # fmt: skip
    if grown:
        plant.note()
    plant.trainer.train()
    plant.reaches("after_loop")


FRAMEWORKS = {
    one.__name__: one
    for one in (
        ddp, fsdp1, fsdp2, megatron, accelerate, fabric, lightning, transformers, ray, zero1, zero2, zero3, trl,
    )
}  # fmt: skip

if __name__ == "__main__":
    plant = Plant(sys.argv[1], json.loads(sys.argv[3]))
    FRAMEWORKS[sys.argv[2]](plant)
    plant.finishes()
    plant.reaches("at_exit")
