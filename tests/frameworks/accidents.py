"""Further plants of ``planted.py``: what goes wrong on single ranks through mistakes, files, memory and terminals."""

import concurrent.futures
import contextlib
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import zlib

import torch
import torch.distributed as dist

STRIKE_ONCE = (
    "save_alone", "new_group", "gather_main", "evaluate_alone", "terminal_input", "debugger", "pipe_full",
    "async_save", "handler", "sigterm", "files", "disk_full", "allocate", "eval_mode", "loads_other", "backward_slow",
    "handled", "child_killed",
)  # fmt: skip
"""Plants that strike once, after the step ``at``."""
STRIKE_ON = ("grows", "compress")
"""Plants that strike after each step from ``at`` on."""
IN_TENTH_STEPS = ("skip", "other_collective", "shape", "metric", "dtype", "wrong_source")
"""Plants in a collective of the user in every tenth step."""
EVERY_STEP = ("local_sgd", "subgroup", "ring", "gather_everywhere")
"""What every rank does after each step."""


class Accidents:
    """Plants between steps: each is a method that gets the model, as of :class:`planted.Plant`."""

    # Collectives that the other ranks do not join.

    def save_alone(self, model):
        """Save the whole state on this rank only."""
        if hasattr(model, "save_checkpoint"):  # an engine of DeepSpeed
            model.save_checkpoint(str(self.folder / "engine"))
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        torch.save(get_model_state_dict(model, options=options), self.folder / "whole.pt")

    def new_group(self, model):
        """Make a group on this rank only."""
        dist.new_group([0, 1])

    def gather_main(self, model):
        """Gather a metric in a branch of the main process."""
        from accelerate.utils import gather

        print(gather(torch.ones(4)).mean())

    def evaluate_alone(self, model):
        """Call the Trainer's evaluation on this rank only."""
        self.trainer.evaluate()

    # What does not come back.

    def terminal_input(self, model):
        """Ask the user at a terminal."""
        use_terminal()
        input("Overwrite the checkpoint? [y/N] ")

    def debugger(self, model):
        """Stop at a breakpoint."""
        use_terminal()
        breakpoint()

    def pipe_full(self, model):
        """Wait for a command that writes more than its pipe holds."""
        command = [sys.executable, "-S", "-c", "print('x' * 1_000_000)"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            child.wait()

    def async_save(self, model):
        """Wait for a thread whose write of the last checkpoint is stuck."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(self.checkpoint_stuck, model).result()

    def handler(self, model):
        """Get a signal whose handler waits for a save that never ends."""
        signal.signal(signal.SIGUSR1, lambda *_: threading.Event().wait())
        os.kill(os.getpid(), signal.SIGUSR1)

    # What ends the rank.

    def sigterm(self, model):
        """Be ended by a signal, as by a supervisor of the host."""
        os.kill(os.getpid(), signal.SIGTERM)

    def files(self, model):
        """Open files until the limit, and close none."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        while True:
            self.kept.append(open(os.devnull))  # noqa: SIM115 - what is planted

    def disk_full(self, model):
        """Save to a full disk."""
        (self.folder / "last.pt").symlink_to("/dev/full")
        torch.save(model.state_dict(), self.folder / "last.pt")

    def allocate(self, model):
        """Allocate more than there is."""
        self.kept.append(torch.ones(1 << 46))

    # What makes ranks differ.

    def eval_mode(self, model):
        """Evaluate, and forget to return to training."""
        self.evaluates(model, 0.5)
        model.eval()

    def loads_other(self, model):
        """Load older parameters."""
        for held, old in zip(model.parameters(), self.kept, strict=True):
            held.data.copy_(old)

    # What makes a rank slow.

    def backward_slow(self, model):
        """Take longer in each backward pass from now on, as where activations come back from a slow disk."""
        next(model.parameters()).register_hook(lambda gradient: time.sleep(0.06))

    def grows(self, model):
        """Take longer with each step, as where a growing list is searched."""
        time.sleep(0.0005 * (self.step - self.at))

    def compress(self, model):
        """Compress a log, without the interpreter's lock."""
        until, text = time.thread_time() + 0.05, repr(list(range(60_000))).encode()
        while time.thread_time() < until:
            zlib.compress(text, 9)

    # Healthy.

    def handled(self, model):
        """Log an error that was handled, with its traceback."""
        try:
            raise ConnectionError("no answer from the tracking server")
        except ConnectionError:
            logging.exception("the upload is tried again later")

    def child_killed(self, model):
        """Kill a command that took too long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(["sleep", "100"], timeout=0.5, check=True)

    def local_sgd(self, model):
        """Average the parameters in every fourth step, and let ranks differ between."""
        if self.step % 4 == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= self.world

    def subgroup(self, model):
        """Sum something up in a group without the last rank."""
        if self.step == 1:
            self.kept.append(dist.new_group([0, 1]))
        if self.step % 10 == 0 and self.rank in (0, 1):
            dist.all_reduce(torch.ones(4), group=self.kept[0])

    def ring(self, model):
        """Pass something to the next rank."""
        sent = dist.isend(torch.ones(4), (self.rank + 1) % self.world)
        dist.recv(torch.ones(4), (self.rank - 1) % self.world)
        sent.wait()

    def gather_everywhere(self, model):
        """Gather objects of different sizes in every tenth step."""
        if self.step % 10 == 0:
            dist.all_gather_object([None] * self.world, ["x" * 1000] * (self.rank + 1))


def use_terminal():
    """Read from a terminal at which nobody types, as of a job that was started from one."""
    _, terminal = os.openpty()
    os.dup2(terminal, 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the rest of the process
