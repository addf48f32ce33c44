"""Further plants of ``planted.py``: before the model is wrapped, and after the loop.

A play of the plant ``outside_loop`` has a place and an act: at the place, the ranks of the play do what ``act`` names,
while the others wait for them in a barrier.
"""

import os
import signal
import socket
import sys
import threading
import time

import torch.distributed as dist
from moments import LONG

PLACES = ("before_group", "before_model", "after_loop", "at_exit")
"""Before the process group; after it and before the model; after the last epoch; after the program."""


class OutsideLoop:
    """Plants outside of the loop, as of :class:`planted.Plant`."""

    def reaches(self, place):
        """Do what the play has at this place."""
        if self.name != "outside_loop" or self.play["place"] != place:
            return
        if self.here:
            time.sleep(self.play.get("after", 0.5))
            self.note()
            getattr(self, self.play["act"])()
        if place in ("before_model", "after_loop") and dist.is_initialized():
            dist.barrier()

    def works_alone(self):
        """Work for some seconds, as a rank that prepares for the others."""
        time.sleep(12)

    def asks_server(self):
        """Read from a server that does not answer."""
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
            client.recv(1)

    def is_killed(self):
        """Be killed, as by the kernel."""
        os.kill(os.getpid(), signal.SIGKILL)

    def finds_no_file(self):
        """Not find a file."""
        open("/nonexistent/labels.json")  # noqa: SIM115

    def leaves_at_once(self):
        """End without cleaning up."""
        os._exit(3)

    def leaves_quietly(self):
        """End without an error."""
        sys.exit(0)

    def keeps_thread(self):
        """Leave a thread that does not end."""
        threading.Thread(target=time.sleep, args=(LONG,)).start()
