#!/usr/bin/env bash
# Start one torchrun per node over ssh.
NODES=(gpu01 gpu02 gpu03 gpu04)
rank=0
for node in "${NODES[@]}"; do
  ssh "$node" "cd ~/project && torchrun --nnodes=4 --node-rank=0 --nproc-per-node=8 --master-addr=gpu01 --master-port=29500 train.py" &
  rank=$((rank + 1))
done
wait
