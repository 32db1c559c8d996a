#!/bin/sh
# What hpcrl.def and Dockerfile run inside their image: install.sh EXTRA, where EXTRA is gpu or cpu, on what they copied to
# /opt/source.  The interpreter is then /opt/hpcrl/bin/python.
set -eu
extra=${1:-}
PATH=/usr/local/cuda/bin:$PATH
case $extra in
cpu) ;;
gpu)
    if ! command -v nvcc >/dev/null; then
        echo "install.sh: BASE has no nvcc, which Transformer Engine and FP8 engines need: give an image with CUDA's devel" >&2
        exit 2
    fi
    ;;
*)
    echo "install.sh: EXTRA is '$extra': give gpu or cpu" >&2
    exit 2
    ;;
esac
export DEBIAN_FRONTEND=noninteractive
apt-get update
# Triton compiles for each node; NCCL opens libibverbs by itself, and without it takes sockets
apt-get install --yes --no-install-recommends python3-venv python3-dev g++ libibverbs1 ibverbs-providers numactl
rm -rf /var/lib/apt/lists/*
python3 -m venv /opt/hpcrl
install() {
    /opt/hpcrl/bin/pip install --no-cache-dir --disable-pip-version-check "$@"
}
cd /opt/source
# without them torch looks for the GPUs of this machine, and a compiler for each core may need more memory than it has
export TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-8.0 9.0 10.0}" MAX_JOBS="${MAX_JOBS:-8}"
if [ "$extra" = cpu ]; then
    install -r requirements/cpu.txt
    install --no-deps -r requirements/cpu-nodeps.txt
    install --no-deps .
elif [ "$(uname -m) $(python3 -c 'import sys; print(*sys.version_info[:2])')" = "x86_64 3 12" ]; then
    install --require-hashes --no-deps -r requirements/gpu.lock
    install --require-hashes --no-deps --no-build-isolation -r requirements/gpu-te.lock
    install --no-deps .
else # the locks are for Python 3.12 on x86-64
    install ".[gpu]"
    install --no-build-isolation "transformer-engine[pytorch,core_cu13]"
fi
rm -rf /opt/source
