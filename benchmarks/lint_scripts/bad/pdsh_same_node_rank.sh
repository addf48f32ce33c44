#!/usr/bin/env bash
set -euo pipefail
MASTER=node1
pdsh -R ssh -w node1,node2 \
  "cd /shared/project && torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=$MASTER --master_port=29500 train.py"
