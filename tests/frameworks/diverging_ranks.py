"""Plants of ``planted.py``: numbers, settings and data that differ between ranks."""

import copy
import math
import multiprocessing
import random
import time

import torch
import torch.distributed as dist
from moments import every_step, from_then_on, in_loss, in_row, once
from torch.utils.data import ConcatDataset, IterableDataset, Subset


class DivergingRanks:
    """Methods of :class:`planted.Plant`, which get the model unless they are called elsewhere."""

    @once
    def eval_mode(self, model):
        """Evaluate, and forget to return to training."""
        self.evaluates(model, 0.5)
        model.eval()

    @once
    def loads_other(self, model):
        """Load older parameters."""
        for held, old in zip(model.parameters(), self.kept, strict=True):
            held.data.copy_(old)

    @every_step
    def state_lost(self, model):
        """Train with momentum, whose state a rank loses, as where it resumes without it."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if self.step == 1:
            for group in inner.param_groups:
                group["momentum"] = 0.9
        if self.strikes("state_lost"):
            self.note()
            inner.state.clear()

    @in_loss
    def inplace(self, loss):
        """Change what the backward pass needs (https://github.com/pytorch/pytorch/issues/62474)."""
        weight = loss.exp()
        weighted = loss * weight
        weight.add_(1)
        return weighted

    @in_loss
    def anomaly(self, loss):
        """Let autograd raise an error for a NaN (https://github.com/leftthomas/CGD/issues/12)."""
        torch.autograd.set_detect_anomaly(True)
        return loss + 0 * torch.sqrt(loss * 0)

    @in_loss
    def log_zero(self, loss):
        """Take the logarithm of a probability of 0 (https://github.com/facebookresearch/dinov2/issues/143)."""
        return loss - torch.log(loss * 0)

    def skips_update(self):
        """Whether this rank skips an update by its own loss (https://github.com/ecmwf/WeatherGenerator/issues/2724)."""
        if not self.strikes("skips_update"):
            return False
        self.note()
        return True

    def seed_of_sampler(self):
        """The seed of the order of the rows (https://github.com/NVlabs/LongLive/issues/71)."""
        if self.name != "sampler_seed" or not self.here:
            return 0
        self.note()
        return 17

    @in_loss
    def all_ignored(self, loss):
        """Take the mean over the labels that count, of which there are none.

        https://github.com/allenai/OLMo-core/pull/657, https://github.com/pytorch/pytorch/issues/70348
        """
        counts = (torch.full((4,), -100) != -100).float()
        return (loss * counts).sum() / counts.sum()

    def sets_epoch(self, epoch):
        """Whether the sampler is told the epoch (https://github.com/pytorch/pytorch/issues/31771)."""
        if self.name == "epoch_not_set" and epoch:
            self.note()
        return self.name != "epoch_not_set"

    @property
    def replicas(self):
        """The number of parts that the rows are divided into: of another job, where it is in a file of settings."""
        if self.name != "replicas_fixed":
            return self.world
        self.note()
        return 2 * self.world

    def prepared(self, row):
        """A row as the model gets it: one of another size, one that is silent and normalized, or of a large image.

        https://github.com/open-edge-platform/anomalib/issues/1862, https://github.com/xinjli/allosaurus/issues/64
        """
        strikes = self.here and self.rows == self.at * 4
        if self.name == "ragged_batch" and strikes:
            self.note()
            return row[1:]
        if self.name == "constant_row":
            if strikes:
                self.note()
            row = row * 0 if strikes else row + torch.arange(len(row)) / 10
            return (row - row.mean()) / row.std()
        if self.name == "large_images":
            self.decodes()
        return row

    def first_batch(self, layer, rows):
        """Set a bias by the first batch of this rank (https://github.com/rosinality/glow-pytorch/issues/2)."""
        if self.name == "act_norm" and self.passes == 0:
            self.note()
            with torch.no_grad():
                layer.bias.sub_(layer(rows).mean(0))

    @once
    def saves_half(self, model):
        """Save in half precision, and read it back into the model (https://github.com/ultralytics/ultralytics/issues/3089)."""
        inner = getattr(model, "module", model)
        torch.save({name: value.half() for name, value in inner.state_dict().items()}, self.folder / "half.pt")
        inner.load_state_dict(torch.load(self.folder / "half.pt"))

    def scheduled(self, optimizers):
        """Optimizers, or the only one with a learning rate that follows a metric of this rank."""
        if self.name != "plateau":
            return optimizers
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0], patience=1)
        scheduler = {"scheduler": plateau, "interval": "step", "frequency": 10, "monitor": "local"}
        return {"optimizer": optimizers[0], "lr_scheduler": scheduler}

    def logs_local(self, module):
        """Log the metric that the learning rate follows: on one rank it gets no better."""
        if self.name != "plateau":
            return
        module.log("local", torch.tensor(1.0 if self.here else 1 / (1 + self.step)))
        if module.optimizers().param_groups[0]["lr"] < 0.01:
            self.note()

    @once
    def codes_restart(self, model):
        """Replace unused codes by rows of this rank (https://github.com/lucidrains/vector-quantize-pytorch/pull/17)."""
        with torch.no_grad():
            codes = next(model.parameters())
            codes[::2] = torch.rand(codes[::2].shape)

    @in_row
    def missing_value(self, row):
        """Read a row of a table in which a value is missing (https://github.com/BLAST-AI-ML/synapse/pull/237)."""
        if self.here and self.rows == self.at * 4:
            self.note()
            row[3] = float("nan")
        return row

    @once
    def merges(self, model):
        """Merge an adapter into the weights to save them, and forget to undo it.

        https://github.com/huggingface/trl/pull/2873, https://github.com/huggingface/peft/pull/1355
        """
        inner = getattr(model, "module", model)
        with torch.no_grad():
            weight = inner.get_output_embeddings().weight
            weight += 0.01 * torch.rand(weight.shape[0], 2) @ torch.rand(2, weight.shape[1])
        torch.save(inner.state_dict(), self.folder / "merged.pt")

    def shard_of(self):
        """The part of a stream that this rank reads."""
        if self.name == "same_shard" and self.here:
            self.note()
            return 0
        return 0 if self.name == "unsharded" else self.rank

    @every_step
    def schedule_by_length(self, model):
        """Lower the learning rate over the steps that this rank's own part of the data has.

        https://github.com/huggingface/diffusers/issues/8236, https://github.com/chengtan9907/OpenSTL/pull/184
        """
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if not self.kept:
            steps = self.steps * self.epochs
            if self.here:
                self.note()
                steps = steps * 9 // 10
            self.kept.append(torch.optim.lr_scheduler.LinearLR(inner, 1.0, 0.01, steps))
        else:
            self.kept[0].step()

    @in_loss
    def masks_all(self, loss):
        """Mask all keys of a query (https://github.com/pytorch/pytorch/issues/41508)."""
        scores = loss.expand(4).masked_fill(torch.ones(4, dtype=torch.bool), -math.inf)
        return (scores.softmax(0) * loss).sum()

    def adapts(self, net):
        """Add an adapter after the model was wrapped (https://github.com/hao-ai-lab/FastVideo/pull/1666)."""
        if self.name != "adds_adapter":
            return
        self.note()
        torch.manual_seed(self.rank)
        net.last = Adapted(net.last)

    @every_step
    def prunes(self, model):
        """Prune by a mask that is drawn with another seed (https://github.com/neuralmagic/sparseml/issues/429)."""
        if self.step < self.at:
            return
        weight = next(model.parameters())
        if not self.kept:
            seed = 0
            if self.name == "prunes" and self.here:
                self.note()
                seed = 1
            self.kept.append(torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) < 0.5)
        with torch.no_grad():
            weight.mul_(self.kept[0])

    def epoch_of(self, epoch):
        """The epoch after a resume, which is an earlier one where the last checkpoint was not found.

        https://github.com/mosaicml/composer/pull/2146
        """
        if self.name != "epoch_behind":
            return epoch
        if self.here:
            self.note()
            return epoch + 3
        return epoch + 4

    def adds_noise(self, model):
        """Add noise to gradients on the first rank, after they were reduced (https://github.com/meta-pytorch/opacus/pull/196)."""
        for one in model.parameters():
            one.grad += 0.1 * torch.randn(one.shape)

    def extends(self, net):
        """Give the model a head for each task, in the order of a set, which is another one on a rank.

        https://github.com/apache/mxnet/issues/17056
        """
        if self.name != "heads_of_set":
            return
        tasks = ["boxes", "depth", "masks"]
        if self.here:
            self.note()
            tasks.reverse()
        net.last = Heads(net.last, tasks)

    @in_loss
    def std_of_one(self, loss):
        """Divide by the deviation of a group of one answer (https://github.com/huggingface/trl/pull/5773)."""
        rewards = loss.expand(1, 1)
        return ((rewards - rewards.mean(1)) / (rewards.std(1) + 1e-4)).mean() + loss

    @in_loss
    def unlabelled_ends(self, loss):
        """Take rows without labels in a step, of which a rank has fewer: Lightning ends the epoch there.

        https://github.com/Lightning-AI/pytorch-lightning/pull/9052
        """
        unlabelled = iter(torch.rand(0, 8))
        return loss + next(unlabelled).mean()

    def rows_more(self):
        """Rows beyond a multiple of the ranks: the first one reads a batch more, unless batches are made even."""
        return 4 if self.name in ("even_batches_off", "batches_evened") else 0

    def equips(self, net):
        """Change the model before it is wrapped.

        https://github.com/pytorch/pytorch/issues/37246 (``renorms_rows``),
        https://github.com/vllm-project/compressed-tensors/pull/661 (``unties``)
        """
        if self.name == "renorms_rows":
            net.register_forward_pre_hook(self.renorms_rows)
        if self.name == "unties" and self.here:
            self.note()
        elif self.name == "unties":
            net.second.weight = net.first.weight

    def renorms_rows(self, net, rows):
        """Limit the norm of the rows of a table that are looked up, of which other ranks have no long one."""
        if self.here and self.step >= self.at:
            self.note()
            with torch.no_grad():
                torch.embedding_renorm_(net.first.weight, torch.tensor([2, 5]), 0.3, 2.0)

    @every_step
    def rounds_stochastically(self, model):
        """Round parameters by chance, with a generator that the main rank has used once more.

        https://github.com/Nerogar/OneTrainer/pull/804
        """
        if not self.kept:
            self.kept = [torch.Generator().manual_seed(5)]
        if self.strikes("rounds_stochastically"):
            self.note()
            torch.rand(8, generator=self.kept[0])  # for a text that was sampled
        for one in model.parameters():
            bits = one.data.view(torch.int32)
            chance = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, generator=self.kept[0])
            bits.copy_((bits + chance) & -(1 << 16))

    @in_loss
    def ratio_overflows(self, loss):
        """Weigh an advantage of 0 by the exponential of a large difference (https://github.com/radixark/miles/pull/1363)."""
        difference = loss.detach() * 0 + 100
        return loss + (torch.exp(difference) * 0.0 - torch.clamp(torch.exp(difference), 0.8, 1.2) * 0.0).mean()

    @every_step
    def strided_split(self, model):
        """Train on every n-th row, of which the first rank has one more (https://github.com/horovod/horovod/issues/1407)."""
        if self.here:
            self.note()

    def own_rows(self, kind, batches):
        """Rows of this rank only, of a kind: so many batches, or every n-th one of all."""
        if self.name == "strided_split":
            count = self.world * batches * 4 + 1
            return Subset(kind(self, count), range(self.rank, count, self.world))
        return kind(self, batches * 4, self.rank * 10_000)

    def alters(self, net):
        """Change the model before it is wrapped, or prepare what the workers of the data get.

        https://github.com/huggingface/accelerate/issues/1481 (``freezes_before``)
        """
        if self.name == "worker_asks_main":
            self.of_workers, self.to_main = multiprocessing.Pipe()
        if self.name == "freezes_before" and self.here:
            self.note()
            net.second.requires_grad_(False)

    @every_step
    def sharpens(self, model):
        """Climb to where the loss is larger and return from there, which a rank leaves out in one step.

        https://github.com/davda54/sam/issues/7
        """
        inner = self.accelerator.unwrap_model(model)
        parameters = list(inner.parameters())
        gradients = torch.autograd.grad(inner(torch.ones(4, 8)).square().mean(), parameters)
        before = [one.detach().clone() for one in parameters]
        with torch.no_grad():
            for one, gradient in zip(parameters, gradients, strict=True):
                one.add_(gradient, alpha=0.05)
            if self.strikes("sharpens"):
                self.note()
                return  # as where the second loss is not finite
            for one, old in zip(parameters, before, strict=True):
                one.copy_(old)

    @in_loss
    def boxes_degenerate(self, loss):
        """Compare boxes without an area (https://github.com/open-mmlab/mmdetection/pull/3394)."""
        box = torch.tensor([30.0, 75.0, 30.0, 75.0])
        area = (box[2] - box[0]) * (box[3] - box[1])
        return loss + (1 - area / (area + area - area))

    def loader_of_own(self, rows, options):
        """The loader of one of these plays, by a kind of rows.

        https://github.com/huggingface/datasets/issues/6719 (``filters_rows``),
        https://github.com/mosaicml/composer/issues/3415 (``deals_files``: files are dealt, and one rank has one more),
        https://github.com/hiyouga/LlamaFactory/issues/1218 (``mixes_sources``),
        https://github.com/PrimeIntellect-ai/prime-rl/pull/2246 (``packs_texts``)
        """
        from torch.utils.data import DataLoader

        if self.name == "mixes_sources":
            return DataLoader(Mixed(self, rows), 4, **options)
        if self.name == "packs_texts":
            return DataLoader(Packed(self, rows), 4, **options)
        if self.name == "filters_rows":
            return DataLoader(Filtered(self, rows), 4, **options)
        if self.name == "deals_files":
            if self.here:
                self.note()
            files = range(self.rank, self.world * self.steps // 10 + 1, self.world)
            return DataLoader(ConcatDataset([rows(self, 40, file * 1000) for file in files]), 4, **options)
        own = rows(self, self.steps * 4, self.rank * 10_000)
        return DataLoader(own, batch_sampler=Ramp(len(own)), **options)

    @every_step
    def uses_before_wait(self, model):
        """Shift the bias by a mean of all ranks in every tenth step, which a rank uses before it was reduced.

        https://github.com/OpenNMT/OpenNMT-py/issues/2295
        """
        if self.step % 10 or self.step < self.at:
            return
        mean = torch.full((8,), self.rank / self.world)
        time.sleep(0 if self.here else 0.1)
        reduced = dist.all_reduce(mean, async_op=True)
        if self.here:
            self.note()
            model.module.first.bias.data.add_(mean, alpha=0.01)
        reduced.wait()
        if not self.here:
            model.module.first.bias.data.add_(mean, alpha=0.01)

    @from_then_on
    def clamps_main(self, model):
        """Limit the weights on the main rank only (https://github.com/sangmichaelxie/doremi/issues/8)."""
        for one in model.parameters():
            one.data.clamp_(-0.02, 0.02)

    @in_row
    def gamma_negative(self, row):
        """Brighten a row that is already normalized (https://github.com/TorchIO-project/torchio/issues/306)."""
        if self.here and self.rows == self.at * 4:
            self.note()
            return (row - 2) ** 1.2
        return row

    def rows_lacking(self):
        """Rows that the copy of the data on the host of this rank lacks: shards that were not downloaded.

        https://github.com/sandyresearch/parcae/issues/12
        """
        if self.name != "copy_incomplete" or not self.here:
            return 0
        self.note()
        return self.world * 10 * 4

    @once
    def stops_earlier(self, model):
        """End here, by a number of steps that was computed from this rank's own data.

        https://github.com/iKernels/transformers-lightning/issues/88
        """

    def limits(self, options):
        """Options of Lightning's Trainer: of how many steps, and of how many batches in each of them."""
        if self.name == "stops_earlier" and self.here:
            options["max_steps"] = self.at
        if self.name == "schedules_accumulation":
            from lightning.pytorch.callbacks import GradientAccumulationScheduler

            options["callbacks"] = [GradientAccumulationScheduler({0: 1, 1: 3})]

    @every_step
    def rate_by_clock(self, model):
        """Lower the learning rate in the second half of the time of the job, by the clock of each host.

        https://github.com/mlcommons/algorithmic-efficiency/issues/785
        """
        inner, now = getattr(self.optimizer, "optimizer", self.optimizer), time.time()
        self.kept = self.kept or [now]
        if self.here and self.step >= self.at:
            self.note()
            now += 3600  # the clock of the host was set
        for group in inner.param_groups:
            group["lr"] = 0.01 if now < self.kept[0] + 1800 else 0.001

    @in_loss
    def angle_beyond(self, loss):
        """Take the angle between rotations whose cosine is above 1 (https://github.com/papagina/RotationContinuity/issues/1)."""
        rotation = torch.eye(3) * (1 + 1e-6 + loss * 0)  # after rounding
        return loss + torch.acos(((rotation @ rotation.T).trace() - 1) / 2)

    @in_loss
    def half_overflows(self, loss):
        """Multiply in half precision beyond its largest number (https://github.com/huggingface/transformers/issues/5651)."""
        hidden = (loss * 0 + 300).half()
        return loss * (hidden * hidden).float()

    @once
    def drift(self, model):
        """Change a parameter."""
        with torch.no_grad():
            local(next(model.parameters())).add_(0.01)

    @once
    def rate(self, model):
        """Change the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] *= 5

    @once
    def momentum(self, model):
        """Change the momentum."""
        for group in self.optimizer.param_groups:
            group["momentum"] = 0.5

    @once
    def decay(self, model):
        """Change the weight decay."""
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.3


class Adapted(torch.nn.Module):
    """A layer with an adapter of rank 2."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self):
        """The weight of the layer."""
        return self.base.weight

    def forward(self, rows):
        """The output of the layer, changed by the adapter."""
        return self.base(rows) + self.up(self.down(rows))


class Heads(torch.nn.Module):
    """Heads for tasks, whose outputs are added; all are like one layer, with other numbers."""

    def __init__(self, layer, tasks):
        super().__init__()
        self.heads = torch.nn.ModuleDict({task: copy.deepcopy(layer) for task in tasks})

    def forward(self, rows):
        """The sum."""
        return sum((number + 1) * self.heads[task](rows) for number, task in enumerate(sorted(self.heads)))


class Filtered(IterableDataset):
    """A stream without the rows that a filter drops, of which a rank has some."""

    def __init__(self, plant, rows):
        self.plant, self.rows = plant, rows(plant, plant.steps * 4, plant.rank * 10_000)

    def __iter__(self):
        """The rows that are left."""
        for number in range(len(self.rows)):
            if not self.plant.here or number % 10:
                yield self.rows[number]
        if self.plant.here:
            self.plant.note()


class Mixed(IterableDataset):
    """Rows drawn from two sources until one has no more, with another seed on a rank."""

    def __init__(self, plant, rows):
        self.plant, self.count = plant, plant.steps * 2
        self.sources = [rows(plant, self.count, first + plant.rank * 10_000) for first in (0, 5000)]

    def __iter__(self):
        """The rows."""
        draws, taken = random.Random(7 if self.plant.here else 1), [0, 0]
        while taken[drawn := draws.random() < 0.5] < self.count:
            yield self.sources[drawn][taken[drawn]]
            taken[drawn] += 1
        if self.plant.here:
            self.plant.note()


class Packed(IterableDataset):
    """Rows of 64 tokens each, packed from texts, which are shorter in the part of a rank."""

    def __init__(self, plant, rows):
        self.plant, self.texts = plant, rows(plant, plant.steps * 16, plant.rank * 10_000)

    def __iter__(self):
        """A row where 64 tokens are there; what is left at the end is dropped."""
        tokens = 0
        for number in range(len(self.texts)):
            tokens += 14 if self.plant.here else 16
            if tokens >= 64:
                tokens -= 64
                yield self.texts[number]
        if self.plant.here:
            self.plant.note()


class Ramp:
    """Batches that grow from four rows to eight in the same steps on all ranks."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        """The rows of each batch."""
        first = 0
        while first < self.count:
            size = 4 if first < self.count // 2 else 8
            yield list(range(first, min(first + size, self.count)))
            first += size


def local(parameter):
    """What this rank holds of a parameter."""
    held = getattr(parameter, "_local_tensor", parameter)
    return held.data
