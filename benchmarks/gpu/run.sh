#!/usr/bin/env bash
# Runs the checks on the machine with the GPU, in the repository's folder, with .gpu/ beside it:
#   bash benchmarks/gpu/run.sh --budget 500 [--stages 0,1,2] [...]
# Results and logs go to $OUT (.gpu/out). Nothing is fetched, and nothing is installed but in $SITE.
set -euo pipefail
kit=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$kit/../.." && pwd)
gpu=$root/.gpu
OUT=${OUT:-$gpu/out}
SITE=${SITE:-/tmp/flashmoa-gpu-site}
PYTHON=${PYTHON:-python3}
[ -e "$gpu/site" ] || { echo "$gpu is not prepared: run make gpu-prepare where there is a network, and take it along"; exit 2; }
mkdir -p "$OUT"
exec > >(tee "$OUT/output.txt") 2>&1

nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv || echo "nvidia-smi is not here"
"$PYTHON" -V; uname -r; nproc; grep Mem /proc/meminfo
# A machine that has been used before may have another kit's packages.
kit_now=$(cd "$gpu" && find wheels site -type f -exec cksum {} + | sort)
if [ "$(cat "$SITE/.ready" 2>/dev/null)" != "$kit_now" ]; then
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
    --upgrade --target "$SITE" "$gpu"/wheels/*.whl
  cp -r "$gpu"/site/* "$SITE/"
  echo "$kit_now" > "$SITE/.ready"
fi
ldconfig -p 2>/dev/null | grep -q libnuma.so.1 || export LD_LIBRARY_PATH=$gpu/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONPATH=$kit/shims:$SITE:$root:$root/server_patches:$root/benchmarks
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export SGLANG_IS_FLASHINFER_AVAILABLE=false TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/flashmoa-gpu-triton}
budget=500
for argument in "$@"; do
  if [ "${before:-}" = --budget ]; then budget=$argument; fi
  case $argument in --budget=*) budget=${argument#*=} ;; esac
  before=$argument
done
cd "$root"
# The program ends by itself; this is for one that hangs. Its engines end with it.
exec timeout --kill-after 5 $((${budget%.*} + 15)) "$PYTHON" -m flashmoa_bench.gpu --out "$OUT" "$@"
