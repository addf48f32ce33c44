"""Trains a small network with Ray Train; fails in the way that the variable FAULT names."""

import os
import signal

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model


def train_loop(config):
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    network = prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    tokens = {"<s>": 0}
    for step in range(1, 11):
        loss = network(torch.rand(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 6 and rank == config["rank"]:
            if config["fault"] == "exception":
                tokens["</s>"]
            if config["fault"] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        ray.train.report({"loss": loss.item(), "step": step})
        if rank == 0:
            print(f"step {step}/10 loss {loss.item():.4f}", flush=True)


def main():
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"fault": os.environ.get("FAULT", ""), "rank": 1},
        scaling_config=ScalingConfig(num_workers=4, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="regression", storage_path=os.path.abspath("results")),
    )
    result = trainer.fit()
    if os.environ.get("FAULT") == "driver":
        print("last step", result.metrics["step"])
    print("training finished")


if __name__ == "__main__":
    main()
