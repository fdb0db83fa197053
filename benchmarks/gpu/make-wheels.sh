#!/usr/bin/env bash
# Make what the GPU machine's Python lacks, and penstock itself, as wheels in build/gpu-wheels (15 MB).
#
#   PYTHON=python3.12 bash benchmarks/gpu/make-wheels.sh
#
# PYTHON is of the GPU machine's version and has torch in its version too, for DeepSpeed's setup; and scikit-build-core,
# nanobind, cmake, ninja, setuptools, wheel, hjson, pydantic, py-cpuinfo, msgpack, einops, tqdm and psutil, since nothing
# is built in isolation. DeepSpeed's kernels are compiled where they run.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=build/gpu-wheels
version=$("$python" -c 'import sys; print(".".join(map(str, sys.version_info[:2])))')
rm -rf "$out"
mkdir -p "$out/peers"

# A wheel that says manylinux_2_N runs on a system of that glibc or a later one; pip wants each one named.
platforms=(--platform manylinux2014_x86_64)
for minor in 17 24 27 28; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
get() {
  "$python" -m pip download -q -c constraints.txt --no-deps --only-binary=:all: --python-version "$version" \
    --implementation cp "${platforms[@]}" -d "$@"
}
build() { "$python" -m pip wheel -q --no-deps --no-build-isolation -w "$@"; }

get "$out" datasets dill multiprocess
build "$out" .
# What DeepSpeed and torchao need, apart: only their own rows of the benchmark see it.
get "$out/peers" annotated-types einops hjson msgpack pydantic pydantic_core py-cpuinfo torchao typing-inspection
DS_BUILD_OPS=0 build "$out/peers" deepspeed==0.19.8
ls -l "$out" "$out/peers"
