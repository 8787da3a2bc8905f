#!/usr/bin/env bash
# Build, test and measure on a machine with a CUDA device and no network, in stages of at most 9 minutes each.
#
#   bench/gpu_check.sh                     all stages in turn
#   bench/gpu_check.sh build tests         these stages
#   FRESH=1 bench/gpu_check.sh tests       again; otherwise steps that passed with these sources are not repeated
#
# Stages: build; tests; kernels (and links, bandwidths); small and large (steps of 350 M and 1.3 B parameters in all
# placements beside plain PyTorch and FSDP2); streams (and stress); 10b (bench/gpt2_10b_v100.sh). A failed step ends
# nothing.
#
#   RESULTS=folder          for logs, figures and the summary (default bench/results/gpu)
#   WHEELS=folder           wheels to install first (default build/gpu-bundle, which `make gpu-bundle` fills)
#   INFINITY_WHEEL=file     this build instead of one made here (default where nvcc is missing: the bundle's)
#   SITE=folder             where packages are installed (default build/gpu-check/site); nothing is installed elsewhere
#   NVME=folder             for states on NVMe (default: the system's folder for temporary files)
#
# Needs python3 with torch, numpy, pytest, cmake, ninja, pybind11 and scikit-build-core. Exit status: 0 if all steps
# passed; 1 if one failed; 2 for an unknown stage; 3 if none failed and some could not run.
set -uo pipefail
cd "$(dirname "$0")/.."
readonly STAGES="build tests kernels small large streams 10b" STAGE_SECONDS=540
results=$(realpath -m "${RESULTS:-bench/results/gpu}")
site=$(realpath -m "${SITE:-build/gpu-check/site}")
wheels=$(realpath -m "${WHEELS:-build/gpu-bundle}")
nvme=$(realpath -m "${NVME:-${TMPDIR:-/tmp}}")
for stage in "$@"; do
  case " $STAGES " in *" $stage "*) ;; *) echo "unknown stage $stage; stages: $STAGES" >&2; exit 2 ;; esac
done
mkdir -p "$results/status" "$site"
sources=$(find infinity csrc bench tests -type f \( -name '*.py' -o -name '*.sh' -o -name '*.cpp' -o -name '*.h' -o -name '*.cu*' \) \
  -print0 | sort -z | xargs -0 cat | sha256sum)
if [ "$sources" != "$(cat "$results/status/sources" 2>/dev/null)" ]; then # outcomes are those of other sources
  rm -rf "$results/status" "$site/infinity"
  mkdir "$results/status"
  echo "$sources" >"$results/status/sources"
fi
source_folder=$PWD
export PATH="$PATH:/usr/local/cuda/bin" # where nvcc and compute-sanitizer often are
# The package that was built, not the source folder, whose compiled modules are missing.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r tests bench pyproject.toml "$work"/
export site PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"

pip_install() { python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "$@"; }
export -f pip_install
record() { echo "$2 $3" >"$results/status/$stage.$1"; } # step, exit status or "skipped", seconds

device=$(python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' && echo yes)
missing="there is no CUDA device here"
if [ -z "$device" ]; then # torch's reason, such as a driver that is older than its build
  reason=$(python3 -c 'import torch; torch.empty(0, device="cuda")' 2>&1 | tail -n 1)
  missing+=${reason:+" ($reason)"}
fi

# try STEP SECONDS COMMAND...: run the command within its seconds and the stage's; keep its output and exit status.
try() {
  local step=$1 limit=$2 left=$((stage_end - SECONDS)) began=$SECONDS status
  shift 2
  if [ "$stage" != build ] && [ -z "${FRESH:-}" ] && grep -qs '^0 ' "$results/status/$stage.$step"; then
    echo "-- $stage: $step passed before"
    return 0
  elif ((left < 5)); then
    skip "$step" "the stage's $STAGE_SECONDS s are over; run it again"
    return 1
  fi
  echo "-- $stage: $step"
  (cd "$work" && timeout -k 10 $((limit < left ? limit : left)) bash -c '"$@"' try "$@") 2>&1 | tee "$results/$stage.$step.txt"
  status=${PIPESTATUS[0]}
  record "$step" "$status" $((SECONDS - began))
  if [ "$status" -ne 0 ]; then echo "-- $stage: $step FAILED with status $status"; fi
  return "$status"
}

skip() {
  echo "-- $stage: $1 not run: $2"
  record "$1" skipped 0
}

build() {
  mapfile -t bundled < <(find "$wheels" -name '*.whl' ! -name 'infinity-*' 2>/dev/null)
  if [ ${#bundled[@]} -gt 0 ] && ! try wheels 60 pip_install "${bundled[@]}"; then
    echo "-- build: the wheels are for one version of Python, and this is $(python3 --version): make gpu-bundle BUNDLE_PYTHON=3.x"
  fi
  local wheel=${INFINITY_WHEEL:-}
  if [ -z "$wheel" ] && ! command -v nvcc >/dev/null; then
    wheel=$(find "$wheels" -name 'infinity-*.whl' 2>/dev/null | sort | tail -n 1)
  fi
  if [ -n "$wheel" ]; then
    try package 60 pip_install "$(realpath "$wheel")"
  else # without kernels the other stages can still run, but this one has failed
    try package 300 pip_install --no-build-isolation -C cmake.define.INFINITY_CUDA=ON "$source_folder" ||
      try without-kernels 200 pip_install --no-build-isolation -C cmake.define.INFINITY_CUDA=OFF "$source_folder"
  fi
  try imports 60 python3 -c 'import hypothesis, infinity, infinity.config, pytest, torch; print(infinity.__file__, torch.__version__)'
  if [ -n "$device" ]; then
    try kernels 60 python3 -c 'import sys; from infinity.optim import cuda_adam; sys.exit(cuda_adam.why_not() or None)'
  else # they can be loaded, and not run
    try kernels 60 python3 -c 'import infinity.native._adam_cuda as native; print(native.ARCHITECTURES)'
  fi
  try report 60 python3 -m infinity.cli.main report
}

# on_device STEP SECONDS COMMAND...
on_device() { if [ -n "$device" ]; then try "$@"; else skip "$1" "$missing"; fi; }

# The options of pyproject.toml name plugins that may be missing here.
pytest_gpu() { on_device "$1" "$2" python3 -m pytest -q -o addopts= --import-mode=importlib -p no:cacheprovider -m gpu "${@:3}"; }

tests() {
  pytest_gpu kernels 240 tests/gpu/test_cuda_adam.py
  pytest_gpu engine 300 tests/gpu/test_cuda.py
}

kernels() {
  on_device adam 180 python3 bench/adam_cuda.py --output "$results/adam_cuda.md"
  on_device links 180 python3 bench/links.py --output "$results/links.json"
  on_device bandwidths 120 python3 -m infinity.cli.main bench-links --path "$nvme" --out "$results/bandwidths.json"
}

small() { on_device steps 530 python3 bench/device_step.py --size 350m --nvme-path "$nvme" --output "$results/gpt2-350m.json"; }
large() { on_device steps 530 python3 bench/device_step.py --size 1.3b --nvme-path "$nvme" --output "$results/gpt2-1.3b.json"; }

streams() {
  pytest_gpu stress 300 tests/gpu/test_streams.py
  if command -v compute-sanitizer >/dev/null; then
    on_device memcheck 230 compute-sanitizer --error-exitcode 9 python3 -m pytest -q -o addopts= --import-mode=importlib \
      -p no:cacheprovider -m gpu tests/gpu/test_cuda_adam.py -k "test_updates and adamw and remainder"
  else
    skip memcheck "there is no compute-sanitizer here"
  fi
}

10b() {
  try smoke 170 bench/gpt2_10b_v100.sh --smoke --nvme-path "$nvme" --out "$results/gpt2-10b-smoke.json"
  try plan 60 bench/gpt2_10b_v100.sh --plan --nvme-path "$nvme" --out "$results/gpt2-10b-plan.json"
  on_device run 500 bench/gpt2_10b_v100.sh --train-iters 4 --nvme-path "$nvme" --out "$results/gpt2-10b.json"
}

for stage in ${*:-$STAGES}; do
  if [ "$stage" != build ] && [ ! -d "$site/infinity" ]; then
    echo "== build, for $stage ($SECONDS s)"
    wanted=$stage stage=build stage_end=$((SECONDS + STAGE_SECONDS))
    build
    stage=$wanted
  fi
  echo "== $stage ($SECONDS s)"
  stage_end=$((SECONDS + STAGE_SECONDS))
  "$stage"
done

echo "== summary ($SECONDS s)"
cd "$work" && python3 bench/gpu_summary.py "$results"
