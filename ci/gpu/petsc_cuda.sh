#!/usr/bin/env bash
# Build PETSc with CUDA and test loops on its memory (tests/gpu), on a machine with an NVIDIA GPU.
#
#   ci/gpu/petsc_cuda.sh [--arch NN] [--cuda-dir DIR] [--check | --build-only] VENV [PYTEST_ARGUMENT...]
#
# VENV        virtual environment to build into; made if it does not exist. Not the one of ci/firedrake.sh, whose
#             PETSc has no CUDA.
# --arch      compute capability without the dot (80, 90), or a list with commas; by default what nvidia-smi says
# --cuda-dir  where the CUDA toolkit is; by default where nvcc is found
# --check     say whether everything is there and what would be built, and end
# --build-only  end before the tests: with --arch, this needs no GPU
#
# PETSc and petsc4py are compiled from their source archives on PyPI, in the versions of ci/constraints.txt, which
# takes about a quarter of an hour. A second run with the same VENV and the same --arch only runs the tests.
#
# Exit status: 0 all tests passed, 2 wrong arguments, 3 something is missing on this machine, 4 the build failed,
# otherwise pytest's (a run in which no test ran is a failure, 5).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$(dirname "$here")")
constraints=$root/ci/constraints.txt

say() { printf '[petsc_cuda] %s\n' "$*" >&2; }
die() {
    local status=$1
    shift
    printf 'ci/gpu/petsc_cuda.sh: %s\n' "$*" >&2
    exit "$status"
}
usage() { die 2 "$1; usage: ci/gpu/petsc_cuda.sh [--arch NN] [--cuda-dir DIR] [--check | --build-only] VENV [PYTEST_ARGUMENT...]"; }

arch='' cuda_dir='' check=0 build_only=0
while [ $# -gt 0 ]; do
    case $1 in
        --arch | --cuda-dir)
            [ $# -ge 2 ] && [ -n "$2" ] || usage "$1 needs a value"
            if [ "$1" = --arch ]; then arch=$2; else cuda_dir=$2; fi
            shift 2
            ;;
        --check)
            check=1
            shift
            ;;
        --build-only)
            build_only=1
            shift
            ;;
        -*) usage "unknown option $1" ;;
        *) break ;;
    esac
done
[ $# -ge 1 ] && [ -n "$1" ] || usage "no virtual environment is given"
venv=$1
shift
[ -z "$arch" ] || [[ $arch =~ ^[1-9][0-9]+(,[1-9][0-9]+)*$ ]] || usage "--arch $arch is no compute capability such as 80 or 90"

# ------------------------------------------------------------------------------------------------------------
# What the machine has

if [ -n "$cuda_dir" ]; then
    nvcc=$cuda_dir/bin/nvcc
    [ -x "$nvcc" ] || die 3 "there is no nvcc in $cuda_dir/bin; give the folder of the CUDA toolkit"
else
    nvcc=$(command -v nvcc) || die 3 "nvcc is missing: install the CUDA toolkit, or say where it is with --cuda-dir"
    # what is on the path may be a link or a script that calls it: it says itself where it is
    home=$("$nvcc" --dryrun -x cu -c /dev/null 2>&1 | sed -n 's/^#\$ _HERE_=//p')
    [ -n "$home" ] || die 3 "$nvcc does not say where it is; give the folder of the CUDA toolkit with --cuda-dir"
    cuda_dir=$(dirname "$home")
fi
[ -e "$cuda_dir/include/cuda.h" ] || [ -e "$cuda_dir/targets/x86_64-linux/include/cuda.h" ] ||
    die 3 "there is no include/cuda.h in $cuda_dir; give the folder of the CUDA toolkit with --cuda-dir"
# PETSc's configure says only that the folder does not work, after minutes; NVIDIA's HPC SDK has a folder for some
for library in cublas cufft curand cusolver cusparse; do
    found=$(find -L "$cuda_dir" "$cuda_dir/../../math_libs" -maxdepth 4 -name "lib$library.so" -print -quit 2>/dev/null || true)
    [ -n "$found" ] || die 3 "there is no lib$library.so in $cuda_dir; install the whole CUDA toolkit, or say where it is with --cuda-dir"
done
for tool in mpicc mpicxx make gcc g++ "${PYTHON:-python3}"; do
    command -v "$tool" >/dev/null || die 3 "$tool is missing; run ci/system-packages.sh firedrake"
done
if [ $build_only = 1 ] && [ -n "$arch" ]; then
    gpus='not needed'
else
    command -v nvidia-smi >/dev/null || die 3 "nvidia-smi is missing: there is no NVIDIA driver here, so nothing could be run"
    gpus=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader 2>/dev/null) || die 3 "nvidia-smi finds no GPU"
    [ -n "$gpus" ] || die 3 "nvidia-smi finds no GPU"
fi
if [ -z "$arch" ]; then
    arch=$(sed 's/.*, *//; s/\.//' <<<"$gpus" | sort -un | paste -sd, -)
fi

pin() {
    sed -n "s/^$1==\([^ ;]*\).*/\1/p" "$constraints" | grep . || die 3 "ci/constraints.txt has no version for $1"
}

options="--with-cuda=1 --with-cuda-dir=$cuda_dir --with-cuda-arch=$arch --with-fortran-bindings=0 --with-debugging=0
--with-x=0 --with-memalign=64 --with-make-np=$(nproc) COPTFLAGS=-O2 CXXOPTFLAGS=-O2 CUDAOPTFLAGS=-O2"
# BLAS from the system where it is there, else PETSc's own, in C
if command -v pkg-config >/dev/null && pkg-config --exists openblas; then
    options+=" --with-blaslapack-lib=-lopenblas --with-fc=0"
else
    options+=" --download-f2cblaslapack=1 --with-fc=0"
fi
options=${options//$'\n'/ }

say "GPUs: $(paste -sd';' - <<<"$gpus")"
say "toolkit: $("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p') in $cuda_dir"
say "PETSc $(pin petsc) for compute capability $arch"
if [ $check = 1 ]; then
    say "configured with $options"
    exit 0
fi

# ------------------------------------------------------------------------------------------------------------
# Build

# settings of the caller's that would end up in the binaries
unset PETSC_DIR PETSC_ARCH PYTHONPATH PYTHONHOME CFLAGS CXXFLAGS CPPFLAGS FFLAGS LDFLAGS MAKEFLAGS
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1 OMP_NUM_THREADS=1

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv" || die 4 "no virtual environment can be made in $venv"
venv=$(cd "$venv" && pwd)
python=$venv/bin/python
note=$venv/petsc_cuda.txt
wanted="petsc $(pin petsc), petsc4py $(pin petsc4py), $options"

logged() {
    local log=$venv/$1.log
    shift
    if ! "$@" >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        die 4 "failed; the whole output is in $log"
    fi
}

install() { logged "$1" "$python" -m pip install -c "$constraints" "${@:2}"; }

if [ "$(cat "$note" 2>/dev/null)" = "$wanted" ]; then
    say "PETSc is in place"
else
    rm -f "$note"
    say "tools and pyop3_mlir"
    install tools pip setuptools wheel cython numpy
    # without isolation, as with it pip would build PETSc once more to compile petsc4py
    say "building PETSc; its output is in $venv/petsc.log"
    MPICC=mpicc MPICXX=mpicxx PETSC_CONFIGURE_OPTIONS=$options \
        install petsc --no-build-isolation --no-deps --no-cache-dir --no-binary petsc --force-reinstall "petsc==$(pin petsc)"
    say "building petsc4py"
    CC=mpicc CFLAGS=-O1 \
        install petsc4py --no-build-isolation --no-deps --no-cache-dir --no-binary petsc4py --force-reinstall "petsc4py==$(pin petsc4py)"
    printf '%s\n' "$wanted" >"$note"
fi
install pyop3_mlir --editable "${root}[test]"

# ------------------------------------------------------------------------------------------------------------
# Test

# most MPIs know nothing of a GPU's memory, and PETSc refuses to start with those unless told so
export PETSC_OPTIONS="${PETSC_OPTIONS:-} -use_gpu_aware_mpi 0"
"$python" -c '
from petsc4py import PETSc
assert PETSc.Sys.hasExternalPackage("cuda"), "this PETSc has no CUDA"
' || die 4 "PETSc was built without CUDA; see $venv/petsc.log, and remove $note to build it anew"
if [ $build_only = 1 ]; then
    say "built"
    exit 0
fi
cd "$root"
"$python" -m pytest -p no:mpi-pytest tests/gpu "$@"
