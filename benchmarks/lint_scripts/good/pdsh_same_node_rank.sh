#!/usr/bin/env bash
set -euo pipefail
MASTER=node1
pdsh -R ssh -w node1,node2 \
  "cd /shared/project && torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_id=run7 --rdzv_endpoint=$MASTER:29500 train.py"
