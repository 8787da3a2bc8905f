#!/usr/bin/env bash
# GPT-2 with 10 billion parameters on one GPU with 32 GB of memory. Further flags replace these: --help lists them.
#
#   bench/gpt2_10b_v100.sh                        parameters and optimizer in host memory, moments of 8 bits
#   bench/gpt2_10b_v100.sh --placement nvme --moments fp32 --nvme-path /mnt/nvme
#   bench/gpt2_10b_v100.sh --plan                 only prints what each placement takes, and allocates nothing
#   bench/gpt2_10b_v100.sh --smoke [--out FILE]   every placement with a tiny model, on any device: a test
set -euo pipefail
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} # threads of torch leave the cores to the optimizer's
exec python3 "$(dirname "$0")/gpt2_10b.py" \
  --num-layers 50 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --vocab-size 50257 \
  --micro-batch-size 10 --checkpoint-activations --device-memory 30GiB "$@"
