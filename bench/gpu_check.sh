#!/usr/bin/env bash
# Build, test and measure on a machine with a CUDA device and no network, in under 9 minutes.
#
#   bench/gpu_check.sh [RESULTS]          RESULTS: folder for the figures (default bench/results/gpu)
#   WHEELS=folder bench/gpu_check.sh      install the wheels in that folder first (pydantic and what it needs, say)
#   INFINITY_WHEEL=file bench/gpu_check.sh     this build instead of one made here: one with CUDA kernels, where there
#                                         is no nvcc (made by `pip wheel --no-deps .` for the same Python)
#
# Needs python3 with torch, cmake, ninja, pybind11 and scikit-build-core. Nothing is installed outside a temporary folder.
set -euo pipefail
cd "$(dirname "$0")/.."
results=$(realpath -m "${1:-bench/results/gpu}")
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdir -p "$results"

step() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }

pip_install() { python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "$@"; }

step "build"
if [ -n "${WHEELS:-}" ]; then pip_install "$WHEELS"/*.whl; fi
if [ -n "${INFINITY_WHEEL:-}" ]; then pip_install "$INFINITY_WHEEL"; else pip_install --no-build-isolation .; fi
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
# The package that was built, not the source folder beside this script, whose natives are not there.
work=$(mktemp -d)
trap 'rm -rf "$site" "$work"' EXIT
cp -r tests bench pyproject.toml "$work"/
cd "$work"
python3 -c 'import infinity, torch; print(infinity.__file__, torch.__version__, torch.cuda.get_device_name())'
python3 -m infinity.cli.main report || true

step "tests marked gpu"
# The timeout plugin may be missing there; its two settings are then unknown to pytest.
timeout 300 python3 -m pytest -q -m gpu tests/gpu -o timeout=0 -W ignore -p no:cacheprovider 2>&1 | tee "$results/tests.txt"

step "speed of the optimizer's kernels"
timeout 90 python3 bench/adam_cuda.py --output "$results/adam_cuda.md" || true

nvme=$work/nvme
mkdir -p "$nvme"
for device in none cpu nvme; do
  step "GPT-2, 350 M parameters, states on $device"
  cat >"$work/engine.json" <<JSON
{"train_batch_size": 8, "bf16": {"enabled": true}, "gradient_clipping": 1.0,
 "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
 "zero_optimization": {"stage": 3,
  "offload_param": {"device": "$device", "nvme_path": "$nvme"},
  "offload_optimizer": {"device": "$device", "nvme_path": "$nvme"}}}
JSON
  timeout 120 python3 bench/pretrain_gpt2.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 \
    --vocab-size 50304 --train-iters 12 --config "$work/engine.json" --metrics "$results/gpt2-350m-$device.jsonl" \
    --save none --output "$work/run-$device" | tail -40
done

step "summary"
python3 bench/gpu_summary.py "$results" | tee "$results/summary.md"
step "done"
