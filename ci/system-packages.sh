#!/usr/bin/env bash
# Install the Debian or Ubuntu packages that the project needs beside Python.
#
#   ci/system-packages.sh [GROUP...]      groups: firedrake vulkan gmsh all (default: firedrake)
#
# firedrake  what PETSc, mpi4py, h5py and Firedrake are compiled with and run on
# vulkan     Mesa's software Vulkan device, on which the device path is tested without a GPU
# gmsh       the X11 and OpenGL libraries that gmsh's Python package loads
#
# Says nothing and takes no time when all is there. Without root, or on another system, it prints what is
# missing and exits with 1. SKIP_SYSTEM_PACKAGES=1 skips all of it, where the same things were installed in
# another way.
set -euo pipefail

declare -A group=(
    # flock comes with util-linux; MPICH, not Open MPI, because its processes may be started as root.
    [firedrake]="build-essential gfortran make flex bison pkg-config util-linux mpich libmpich-dev libhdf5-mpich-dev libopenblas-dev"
    [vulkan]="mesa-vulkan-drivers libvulkan1"
    [gmsh]="libglu1-mesa libxrender1 libxcursor1 libxft2 libxinerama1"
)

usage() {
    echo "usage: ci/system-packages.sh [firedrake|vulkan|gmsh|all]..." >&2
    exit 2
}

[ "${SKIP_SYSTEM_PACKAGES:-0}" != 1 ] || exit 0
[ $# -gt 0 ] || set -- firedrake
wanted=()
for name in "$@"; do
    case $name in
        all) read -ra wanted <<<"${group[firedrake]} ${group[vulkan]} ${group[gmsh]}" ;;
        firedrake | vulkan | gmsh)
            read -ra more <<<"${group[$name]}"
            wanted+=("${more[@]}")
            ;;
        *) usage ;;
    esac
done

case " $* " in
    *" firedrake "* | *" all "*)
        # Debian's own Python keeps its headers and its venv module in packages of their own; others carry them.
        if [ "$(command -v python3 || true)" = /usr/bin/python3 ]; then
            wanted+=(python3-dev python3-venv)
        fi
        ;;
esac

missing=()
if command -v dpkg-query >/dev/null; then
    for package in "${wanted[@]}"; do
        # The status counts, not the exit code: a removed package whose settings stayed is known as well.
        status=$(dpkg-query -W -f='${db:Status-Status} ' "$package" 2>/dev/null || true)
        case " $status" in
            *" installed "*) ;;
            *) missing+=("$package") ;;
        esac
    done
else
    missing=("${wanted[@]}")
fi
[ ${#missing[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    echo "This system is neither Debian nor Ubuntu. Install what these Debian packages hold, then try again:" >&2
    echo "  ${missing[*]}" >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "Some system packages are missing, and installing them takes root. Run this, then try again:" >&2
    echo "  apt-get update && apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
fi

echo "Installing system packages: ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
# Another apt run, such as that of a second checkout, is waited for.
options=(-qq -o DPkg::Lock::Timeout=600 -o Acquire::Retries=3)
# A partly failed update is often enough; if it is not, the installation says so.
apt-get "${options[@]}" update || echo "apt-get update failed; trying with the package lists as they are" >&2
apt-get "${options[@]}" install -y --no-install-recommends "${missing[@]}" >/dev/null
