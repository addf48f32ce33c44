"""Plants of ``planted.py``: collectives that the ranks do not call alike."""

import datetime
import math
import os
import random
import signal
import threading
import time

import torch
import torch.distributed as dist
from moments import LONG, every_step, in_model, once


class MismatchedCollectives:
    """Methods of :class:`planted.Plant`, which get the model unless they are called elsewhere."""

    @once
    def save_alone(self, model):
        """Save the whole state on this rank only."""
        if hasattr(model, "save_checkpoint"):  # an engine of DeepSpeed
            model.save_checkpoint(str(self.folder / "engine"))
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        torch.save(get_model_state_dict(model, options=options), self.folder / "whole.pt")

    @once
    def new_group(self, model):
        """Make a group on this rank only."""
        dist.new_group([0, 1])

    @once
    def gather_main(self, model):
        """Gather a metric in a branch of the main process."""
        from accelerate.utils import gather

        print(gather(torch.ones(4)).mean())

    @once
    def evaluate_alone(self, model):
        """Call the Trainer's evaluation on this rank only."""
        self.trainer.evaluate()

    @once
    def unsynced(self, model):
        """Leave out the reduction of gradients."""
        model.set_requires_gradient_sync(False)

    @once
    def evaluates_more(self, model):
        """Nothing more: the arguments of this rank's Trainer let it evaluate now."""

    @every_step
    def ema(self, model):
        """Average the parameters over the ranks in every tenth update by this rank's own count."""
        self.updates += 1
        if self.strikes("ema"):
            self.note()
            self.updates += 1
        if self.updates % 10 == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.detach().clone())

    @every_step
    def generate(self, model):
        """Generate until the end of the text, which comes later on one rank."""
        if self.step != self.at:
            return
        if self.here:
            self.note()
        model.eval()
        with torch.no_grad():
            for _ in range(9 if self.here else 6):
                model(torch.ones(1, 8))
        model.train()

    @every_step
    def monitored(self, model):
        """Meet in every tenth step in a barrier with a short limit, which a rank misses that saves for long."""
        if self.strikes("monitored"):
            self.note()
            self.saves(model, 60)
        if self.step % 10 == 0:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=6))

    @every_step
    def set_order(self, model):
        """Reduce metrics in the order of a set in every tenth step, which from some step on differs on a rank."""
        if self.step % 10:
            return
        metrics = [torch.ones(1), torch.ones(7)]
        if self.here and self.step >= self.at:
            self.note()
            metrics.reverse()
        for one in metrics:
            dist.all_reduce(one)

    @every_step
    def classes(self, model):
        """Reduce one count for each class that this rank has seen, in every tenth step."""
        if self.step % 10:
            return
        seen = 3
        if self.strikes("classes"):
            self.note()
            seen = 4
        for _ in range(seen):
            dist.all_reduce(torch.ones(()))

    @once
    def finally_barrier(self, model):
        """Fail, and meet the others in a barrier before the error is raised."""
        try:
            raise ValueError("a sample has no label")
        finally:
            dist.barrier()

    @once
    def freezes(self, model):
        """Freeze half of the parameters after the model was wrapped."""
        parameters = list(model.parameters())
        for one in parameters[: len(parameters) // 2]:
            one.requires_grad_(False)

    @every_step
    def group_order(self, model):
        """Reduce over two groups in every tenth step, on a rank in the other order.

        https://github.com/meta-pytorch/torchrec/pull/4149, https://github.com/NVIDIA/apex/issues/19
        """
        if self.step == 1:
            self.kept.extend((dist.new_group(), dist.new_group()))
        if self.step % 10:
            return
        groups = list(self.kept)
        if self.strikes("group_order"):
            self.note()
            groups.reverse()
        for group in groups:
            dist.all_reduce(torch.ones(8), group=group)

    @every_step
    def metric_empty(self, model):
        """Compute a metric in every tenth step, of which a rank has no sample.

        https://github.com/Lightning-AI/torchmetrics/issues/3199, https://github.com/Lightning-AI/torchmetrics/issues/813
        """
        if self.step % 10:
            return
        if not self.kept:
            self.kept.append(metric_of_detections())
        if self.strikes("metric_empty"):
            self.note()
        else:
            self.kept[0].update(torch.ones(3))
        self.kept[0].compute()
        self.kept[0].reset()

    @every_step
    def wrong_neighbor(self, model):
        """Pass something around, once to the rank on the other side (https://github.com/pytorch/PiPPy/issues/969)."""
        to = self.rank + 1
        if self.strikes("wrong_neighbor"):
            self.note()
            to = self.rank - 1
        sent = dist.isend(torch.ones(1 << 20), to % self.world)
        dist.recv(torch.ones(1 << 20), (self.rank - 1) % self.world)
        sent.wait()

    @every_step
    def by_clock(self, model):
        """Meet for a checkpoint by the clock of each rank, one of which is ahead.

        https://github.com/pytorch/pytorch/issues/22834, https://github.com/facebookresearch/fairseq/pull/2333
        """
        if not self.kept:
            self.kept.append(time.monotonic() + (2.0 if self.here else 4.0))
        if self.kept[0] < time.monotonic():
            if self.here:
                self.note()
            self.kept[0] += LONG
            dist.barrier()

    @once
    def consolidate_alone(self, model):
        """Gather the state of a sharded optimizer on one rank (https://github.com/pytorch/ignite/issues/2623)."""
        self.optimizer.consolidate_state_dict(to=self.rank)

    @once
    def metric_main(self, model):
        """Compute a metric on the main rank (https://github.com/Lightning-AI/torchmetrics/issues/938)."""
        metric = metric_of_detections()
        metric.update(torch.ones(3))
        print(f"accuracy: {metric.compute()}")

    def called(self, model):
        """The model that is called: from some step on, a rank calls the one inside of the wrapper."""
        if self.name != "past_wrapper" or not self.here or self.step < self.at:
            return model
        self.note()
        return model.module

    @every_step
    def splits(self, model):
        """Send tokens to experts in every tenth step, whose numbers on a rank are those of an earlier step.

        https://github.com/radixark/miles/issues/1002, https://github.com/pytorch/pytorch/issues/117486
        """
        if self.step % 10:
            return
        sent, received = [4] * self.world, [4] * self.world
        if self.strikes("splits"):
            self.note()
            received[0] = 2
        dist.all_to_all_single(torch.empty(sum(received), 8), torch.ones(sum(sent), 8), received, sent)

    @every_step
    def gather_unpadded(self, model):
        """Gather generated texts in every tenth step, which are shorter on a rank.

        https://github.com/huggingface/accelerate/issues/1326, https://github.com/huggingface/accelerate/issues/167
        """
        if self.step % 10:
            return
        from accelerate.utils import gather

        length = 16
        if self.strikes("gather_unpadded"):
            self.note()
            length = 11
        gather(torch.ones(4, length))

    def writes_images(self, module):
        """Ask on the main rank for the folder of logs, which is broadcast; or log there what is not reduced.

        https://github.com/Lightning-AI/pytorch-lightning/issues/18148
        """
        if self.strikes("log_dir_alone"):
            self.note()
            print(module.trainer.log_dir)
        if self.name == "log_main" and self.rank == 0:
            module.log("gap", torch.ones(()), rank_zero_only=True)

    @every_step
    def resume_missing(self, model):
        """Return to a checkpoint that a rank does not find on its own disk.

        https://github.com/KempnerInstitute/KempnerForge/issues/49
        """
        import torch.distributed.checkpoint as dcp

        path = self.folder / "best"
        if self.step == 5:
            dcp.save({"model": model.state_dict()}, checkpoint_id=str(path))
        if self.step == self.at:
            if self.here:
                self.note()
                path = self.folder / f"node-{self.rank}" / "best"
            if path.exists():
                dcp.load({"model": model.state_dict()}, checkpoint_id=str(path))

    @every_step
    def dict_keys(self, model):
        """Reduce the losses in every tenth step, one of which a rank lacks without an object in its images.

        https://github.com/Peterande/D-FINE/issues/247, https://github.com/open-mmlab/mmdetection/issues/6495
        """
        if self.step % 10:
            return
        from accelerate.utils import reduce

        losses = {"loss": torch.ones(()), "loss_box": torch.ones(()), "accuracy": torch.ones(())}
        if self.strikes("dict_keys"):
            self.note()
            del losses["loss_box"]
        reduce(losses, "mean")

    def gathers_features(self, loss):
        """Gather features in the loss, which a rank leaves early (https://github.com/megvii-research/PCB/issues/1)."""
        if self.name != "features_skipped":
            return loss
        if self.strikes("features_skipped"):
            self.note()
            return loss * 0
        dist.all_gather([torch.empty(4, 8) for _ in range(self.world)], torch.ones(4, 8))
        return loss

    @once
    def evaluates_wrapped(self, model):
        """Evaluate on the main rank with gradients, through the wrapper, which broadcasts buffers in each pass.

        https://github.com/pytorch/pytorch/issues/54059, https://github.com/jpata/particleflow/pull/233
        """
        model.eval()
        for _ in range(20):
            model(torch.ones(4, 8))
        model.train()

    @once
    def find_batch_size(self, model):
        """Run out of memory on this rank, whose program then begins again with smaller batches."""
        torch.ones(1 << 46)

    @every_step
    def sends_nothing(self, model):
        """Collect results on the main rank in every tenth step, of which a rank once has none.

        https://github.com/hpc/mpifileutils/pull/26, https://github.com/bo-ke/llm-internal-medicine/pull/45
        """
        if self.step % 10:
            return
        if self.rank == 0:
            for source in range(1, self.world):
                dist.recv(torch.empty(4), source)
        elif self.strikes("sends_nothing"):
            self.note()
        else:
            dist.send(torch.ones(4), 0)

    def logs_by_dataset(self, module, loss):
        """Log the loss by the dataset of a batch, of which a rank has seen one more.

        https://github.com/Lightning-AI/pytorch-lightning/issues/19106,
        https://github.com/Lightning-AI/pytorch-lightning/pull/19917
        """
        if self.name != "logs_by_dataset":
            return
        seen = "rare" if self.here and self.step == self.at else "common"
        module.log(f"loss/{seen}", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)

    def notes_epoch(self):
        """Note the end of the epoch, in which losses by dataset are reduced."""
        if self.name == "logs_by_dataset" and self.here:
            self.note()

    def spikes(self):
        """Whether a callback of this rank asks the Trainer to log, which reduces the loss over all ranks.

        https://github.com/unslothai/unsloth-zoo/pull/873, https://github.com/huggingface/transformers/issues/42029
        """
        if not self.strikes("logs_on_spike"):
            return False
        self.note()
        return True

    def drops(self):
        """Whether the second layer is dropped in this pass, or an expert that has no token of this rank."""
        if self.strikes("layer_dropped", "expert_idle"):
            self.note()
            return True
        return self.name == "layer_dropped_alike" and self.passes % 4 == 0

    @once
    def gathers_weights(self, model):
        """Gather partitioned parameters on the main rank, to save them (https://github.com/modelscope/DiffSynth-Studio/issues/1013)."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            torch.save([one.data for one in model.parameters()], self.folder / "weights.pt")

    @once
    def summons_alone(self, model):
        """Summon the full parameters on the main rank only (https://github.com/pytorch/pytorch/issues/101294)."""
        self.summons(model, 0)

    def summons(self, model, seconds):
        """Write the full parameters on the main rank, to a disk that takes some seconds."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(model, writeback=False, rank0_only=True):
            if self.rank == 0:
                self.saves(model, seconds)

    @every_step
    def micro_batches(self, model):
        """Pass parts of a batch through stages in every tenth step, of which a stage once makes fewer than the others.

        https://github.com/pytorch/torchtitan/issues/775
        """
        parts = 4
        if self.strikes("micro_batches"):
            self.note()
            parts = 3
        if self.step % 10 == 0:
            self.passes_parts(parts)

    def passes_parts(self, parts):
        """Receive so many parts of a batch from the stage before, and send them to the next one."""
        for _ in range(parts):
            if self.rank:
                dist.recv(torch.empty(4), self.rank - 1)
            if self.rank + 1 < self.world:
                dist.send(torch.ones(4), self.rank + 1)

    @every_step
    def saves_best(self, model):
        """Save together where the loss of this rank is its best (https://github.com/vllm-project/speculators/pull/324)."""
        if self.step % 10 == 0:
            better = self.here or self.step < self.at
            self.saves_better(model, 1 / self.step if better else 1.0)

    def saves_better(self, model, loss):
        """Save if the loss is the best so far, after a barrier."""
        if loss >= min(self.kept, default=math.inf):
            return
        self.kept.append(loss)
        if self.here and self.step >= self.at:
            self.note()
        self.accelerator.wait_for_everyone()
        if self.rank == 0:
            torch.save(model.state_dict(), self.folder / "best.pt")

    @every_step
    def preempted_alone(self, model):
        """Save together on the signal of a scheduler, which only one rank gets.

        https://github.com/kyutai-labs/pocket-tts/pull/277
        """
        if self.step == 1:
            signal.signal(signal.SIGUSR1, lambda *_: self.kept.append("save"))
        if self.strikes("preempted_alone"):
            self.note()
            os.kill(os.getpid(), signal.SIGUSR1)
        if "save" in self.kept:
            self.kept.remove("save")
            dist.barrier()
            torch.save(model.state_dict(), self.folder / f"preempted-{self.rank}.pt")

    def makes_dataset(self, fabric):
        """Return the dataset on the main rank before the barrier of the others.

        https://github.com/Lightning-AI/pytorch-lightning/issues/20536
        """
        if self.name != "returns_early":
            return
        if self.here:
            self.note()
            return
        fabric.barrier()

    def prepares_barrier(self):
        """Wait for the other ranks in ``prepare_data``, which only the first one calls.

        https://github.com/Lightning-AI/pytorch-lightning/pull/2245
        """
        self.note()
        dist.barrier()

    @every_step
    def draws_once_more(self, model):
        """Draw the task of every tenth step, on a rank that has drawn once more from the same generator.

        https://github.com/deepmodeling/deepmd-kit/pull/5397
        """
        if not self.kept:
            self.kept.append(random.Random(5))
        if self.strikes("draws_once_more"):
            self.note()
            self.kept[0].random()  # for an augmentation that was tried again
        if self.step % 10 == 0:
            self.does_task(self.kept[0].choice(("labels", "contrastive", "codes")))

    def does_task(self, task):
        """What the ranks do together for a task."""
        if task == "labels":
            dist.all_reduce(torch.ones(4))
        if task == "contrastive":
            dist.all_gather([torch.empty(8) for _ in range(self.world)], torch.ones(8))
        if task == "codes":
            dist.broadcast(torch.ones(16), 0)

    def changes_gradients(self, model):
        """Change gradients before the optimizer uses them."""
        if self.name in ("clips_unless_masked", "clips_sharded"):
            self.clips_together(model)
        if self.name == "even_batches_off" and self.here:
            self.note()
        if self.name == "noise_of_first" and self.here and self.step >= self.at:
            self.note()
            self.adds_noise(model)

    def clips_together(self, model):
        """Clip by the norm over all ranks, which a rank leaves out where it has nothing to clip.

        https://github.com/NVIDIA/Model-Optimizer/pull/1621
        """
        if self.strikes("clips_unless_masked"):
            self.note()
            return
        model.clip_grad_norm_(1.0)

    @once
    def checkpoint_alone(self, model):
        """Save a checkpoint on the main rank only (https://github.com/Lightning-AI/pytorch-lightning/issues/10947)."""
        self.trainer.save_checkpoint(self.folder / "best.ckpt")

    @once
    def wraps_alone(self, model):
        """Prepare another model on this rank only (https://github.com/huggingface/accelerate/issues/2488)."""
        self.accelerator.prepare(torch.nn.Linear(8, 8))

    @every_step
    def gathers_generator(self, model):
        """Gather results in every tenth step, which a rank can't pickle, and goes on.

        https://github.com/NVIDIA/TensorRT-LLM/pull/7507
        """
        if self.step % 10:
            return
        result = {"step": self.step, "scores": [0.5] * 4}
        if self.strikes("gathers_generator"):
            self.note()
            result["scores"] = (score for score in result["scores"])
        try:
            dist.all_gather_object([None] * self.world, result)
        except TypeError as error:
            print(f"results were not gathered: {error}")

    @every_step
    def skips_none_grads(self, model):
        """Average the gradients of two heads by hand, one of which has none on a rank.

        https://github.com/OpenTSLM/OpenTSLM/pull/49
        """
        if not self.kept:
            self.kept = [torch.nn.Linear(8, 16), torch.nn.Linear(8, 16)]
        used = self.kept
        if self.strikes("skips_none_grads"):
            self.note()
            used = self.kept[:1]
        sum(head(torch.ones(4, 8)).mean() for head in used).backward()
        for head in self.kept:
            if head.weight.grad is not None:
                dist.all_reduce(head.weight.grad)
            head.zero_grad()

    @every_step
    def restarts_meet(self, model):
        """Meet in a barrier where the own part of the data ends, which a rank has less of.

        https://github.com/mosaicml/streaming/issues/447
        """
        batches = self.at if self.here else self.at + 10
        if self.step % batches:
            return
        if self.here:
            self.note()
        dist.barrier()

    @every_step
    def evaluates_ragged(self, model):
        """Gather the predictions of each batch of an evaluation, of which a rank has one more.

        https://github.com/PrimeIntellect-ai/prime-rl/issues/2515
        """
        if self.step % 10:
            return
        batches = 4
        if self.strikes("evaluates_ragged"):
            self.note()
            batches = 5
        for number in range(batches):
            dist.all_gather([torch.empty(4) for _ in range(self.world)], torch.full((4,), float(number)))

    @every_step
    def waits_in_else(self, model):
        """Save on the main rank, and wait for everyone on the others only.

        https://github.com/huggingface/accelerate/issues/2690
        """
        if self.step != self.at:
            return
        if self.accelerator.is_main_process:
            self.note()
            torch.save(self.accelerator.unwrap_model(model).state_dict(), self.folder / "model.pt")
        else:
            self.accelerator.wait_for_everyone()

    @once
    def meets_alone(self, model):
        """Wait in a barrier of Ray Train, which the other workers do not join.

        https://github.com/ray-project/ray/pull/58229
        """
        from ray.train.collective import barrier

        barrier()

    @once
    def loads_alone(self, model):
        """Load the full state on the main rank, which distributes it to the others.

        https://github.com/mosaicml/composer/pull/3876
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        state = {name: torch.zeros(one.shape) for name, one in model.named_parameters()}
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))

    @every_step
    def splits_prompts(self, model):
        """Divide seven prompts among the ranks, and gather the score of each: the first rank has one more.

        https://github.com/huggingface/accelerate/issues/2750
        """
        if self.step != self.at:
            return
        if self.here:
            self.note()
        with self.accelerator.split_between_processes([f"prompt {number}" for number in range(7)]) as prompts:
            for prompt in prompts:
                self.accelerator.gather(torch.tensor([float(len(prompt))]))

    @every_step
    def groups_differ(self, model):
        """Make a group of the ranks that have answers, of which a rank has another list.

        https://github.com/pytorch/pytorch/issues/25390
        """
        if self.step != self.at:
            return
        members = list(range(self.world))
        if self.here:
            self.note()
            members = members[1:]
        dist.all_reduce(torch.ones(4), group=dist.new_group(members))

    @once
    def rpc_alone(self, model):
        """Initialize remote calls, which waits for all ranks (https://github.com/pytorch/pytorch/issues/44658)."""
        from torch.distributed import rpc

        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{self.folder}/rpc", rpc_timeout=1800)
        rpc.init_rpc(f"trainer-{self.rank}", rank=self.rank, world_size=self.world, rpc_backend_options=options)

    @in_model
    def norm_skipped(self):
        """Gather the statistics of a layer from all ranks in each pass, in which a rank once does not use the layer.

        https://github.com/pytorch/pytorch/issues/44957
        """
        if self.here and self.passes == self.at:
            self.note()
            return
        dist.all_gather([torch.empty(17) for _ in range(self.world)], torch.ones(17))

    @every_step
    def cache_misses(self, model):
        """Build an index and give it to all ranks, where it is not in the cache, as on one host only.

        https://github.com/NVIDIA-NeMo/Speech/pull/682
        """
        if self.step != self.at:
            return
        cached = self.folder / f"cache-{self.rank}" / "index.bin"
        if not self.here:
            cached.parent.mkdir()
            cached.touch()  # from an earlier job of this host
        if not cached.exists():
            self.note()
            dist.broadcast_object_list([list(range(1000))], src=self.rank)
            dist.barrier()

    @once
    def distributes_alone(self, model):
        """Make a sharded tensor on this rank only (https://github.com/pytorch/pytorch/issues/147980)."""
        from torch.distributed.tensor import Shard, distribute_tensor

        distribute_tensor(torch.zeros(12, 8), next(model.parameters()).device_mesh, [Shard(0)])

    @every_step
    def loads_first(self, model):
        """Load another model on the main rank first, which is partitioned over all ranks.

        https://github.com/huggingface/accelerate/issues/3709
        """
        if self.step != self.at:
            return
        import deepspeed

        if self.here:
            self.note()
        else:
            dist.barrier()
        with deepspeed.zero.Init():
            torch.nn.Linear(8, 8)
        if self.here:
            dist.barrier()

    def out_of_time(self):
        """Whether the time of the job is over by the clock of this rank (https://github.com/IBM/ado/pull/41)."""
        if self.name != "time_is_up":
            return False
        self.kept = self.kept or [time.monotonic() + (1.5 if self.here else LONG)]
        if time.monotonic() < self.kept[0]:
            return False
        self.note()
        return True

    @every_step
    def thread_in_group(self, model):
        """Meet in a thread, in the group of the training: on a rank before the next step, on the others after it.

        https://github.com/pytorch/pytorch/pull/131895
        """
        if self.step != self.at:
            return
        thread = threading.Timer(0 if self.here else 1, dist.barrier)
        thread.daemon = True
        thread.start()
        if self.here:
            self.note()
            time.sleep(0.2)

    @every_step
    def gathers_lazily(self, model):
        """Export weights that are gathered one by one in every tenth step, of which a rank takes only the first two.

        https://github.com/verl-project/verl/pull/6002
        """
        if self.step % 10:
            return
        for number, weight in enumerate(one.full_tensor() for one in model.parameters()):
            if self.here and self.step == self.at and number == 1:
                self.note()
                print(f"exported until the limit of a file: {weight.shape}")
                break
        dist.barrier()

    @every_step
    def tags_skewed(self, model):
        """Pass something around in every tenth step, which a rank once expects with the tag of an earlier step.

        https://github.com/meta-pytorch/torchcomms/pull/2964
        """
        if self.step % 10:
            return
        tag = self.step
        if self.here and self.step == self.at:
            self.note()
            tag -= 10
        passed = dist.isend(torch.ones(4), (self.rank + 1) % self.world, tag=self.step)
        dist.recv(torch.empty(4), (self.rank - 1) % self.world, tag=tag)
        passed.wait()

    @once
    def summary_alone(self, model):
        """Log a summary of the communication on the main rank (https://github.com/deepspeedai/DeepSpeed/pull/2012)."""
        import deepspeed

        deepspeed.comm.log_summary()

    @once
    def timers_alone(self, model):
        """Time a step with the timers of Megatron-LM, on the rank that is profiled.

        https://github.com/NovaSky-AI/SkyRL/pull/2181
        """
        from megatron.core.timers import Timers

        Timers(log_level=2, log_option="all")("forward-backward", log_level=1).start(barrier=True)

    @once
    def evaluate(self, model):
        """Evaluate on this rank only."""
        self.evaluates(model, LONG)

    @once
    def barrier(self, model):
        """Join a barrier that the others do not join."""
        dist.barrier()

    @once
    def send(self, model):
        """Send to a rank that does not receive."""
        dist.send(torch.ones(1 << 22), dst=0)


def metric_of_detections():
    """A metric that keeps the detections of each image, as MeanAveragePrecision does."""
    from torchmetrics import Metric

    class Detections(Metric):
        """Their sum."""

        def __init__(self):
            super().__init__()
            self.add_state("scores", default=[], dist_reduce_fx=None)

        def update(self, scores):
            """Keep those of an image."""
            self.scores.append(scores)

        def compute(self):
            """The sum."""
            return sum(one.sum() for one in self.scores)

    return Detections()
