#!/usr/bin/env bash
# Run Firedrake's own tests twice, on its own engine and on this one, and compare.
#
#   ci/firedrake-suite.sh DIR [PATH...]
#
# DIR is a checkout of Firedrake with its tests: of the release that is installed for the Python in $PYTHON (default:
# python), whose engine is PyOP2; or of the branch with pyop3 (connorjward/pyop3), built for that Python, whose engine
# is loopy. That Python must have this package, pytest and mpi-pytest as well. PATH names tests below DIR; without it
# those run that are listed below, and pyop3's own where it is there.
#
# Prints passed and failed of each run, the tests that pass on Firedrake's engine and fail on this one, and the share
# of loops that this one ran. Exits with 1 if there are such tests. What pytest wrote stays in the folder that is
# named at the end ($SUITE_OUTPUT, or a new one); what is there already is not run again. Tests of several processes
# run where mpiexec is found, unless SUITE_SERIAL=1. SUITE_TIMEOUT (seconds, default 600) bounds each file. With
# PYOP3_MLIR_VERIFY=1 each single loop is compared, too.
set -euo pipefail

[ $# -ge 1 ] && [ -d "$1/tests/firedrake" ] || {
    echo "usage: ci/firedrake-suite.sh DIR [PATH...] where DIR holds tests/firedrake/" >&2
    exit 2
}
directory=$(cd "$1" && pwd)
shift
python=$(command -v "${PYTHON:-python}") || {
    echo "ci/firedrake-suite.sh: there is no ${PYTHON:-python}" >&2
    exit 2
}
if [ -d "$directory/pyop3" ]; then theirs=loopy; else theirs=PyOP2; fi

regression=(
    assemble bcs cofunction conditional constant expressions facet_avg facets function helmholtz helmholtz_mixed
    identity integral_hex interior_facets interpolate matrix mixed_interior_facets mixed_mats mixed_tensor
    nonlinear_helmholtz norm par_loops periodic_2d piola_mixed_fn poisson_mixed_no_bcs poisson_strong_bcs projection
    pyop3 real_space restricted_function_space scaled_mass split steady_advection_2D subdomain_integrals
    tensor_algebra tensor_elements upwind_flux vertex_based_limiter vfs_component_bcs
)
if [ $# -eq 0 ]; then
    set -- tests/pyop3/test_direct_loop.py tests/pyop3/unit tests/pyop3/integration "${regression[@]/#/tests/firedrake/regression/test_}"
    for name; do
        [ -e "$directory/$name" ] && set -- "$@" "$name"
        [ -e "$directory/$name.py" ] && set -- "$@" "$name.py"
        shift
    done
fi

output=${SUITE_OUTPUT:-$(mktemp -d "${TMPDIR:-/tmp}/firedrake-suite.XXXXXX")}
mkdir -p "$output"
cat >"$output/with_back_end.py" <<'PYTHON'
"""A pytest plugin that installs the back end for all tests, and writes its report."""

import json
import os

import firedrake  # noqa: F401

from pyop3_mlir import frontends


def pytest_configure(config):
    frontends.install()


def pytest_unconfigure(config):
    content = frontends.report_as_dict()
    with open(f"{os.environ['SUITE_REPORT']}.{os.getpid()}.json", "w") as file:
        json.dump(content, file)
PYTHON

# of a release the installed modules are meant, not what lies beside the tests
[ "$theirs" = PyOP2 ] || PYTHONPATH="$directory${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=1 PYTHONPATH="$output${PYTHONPATH:+:$PYTHONPATH}" FIREDRAKE_DISABLE_OPTIONS_LEFT=1
export SUITE_REPORT=$output/report
if [ "${SUITE_SERIAL:-0}" = 1 ] || ! command -v mpiexec >/dev/null; then
    select=(-m "not parallel")
else
    select=()
fi

run() {
    local engine=$1 path file
    shift
    for path in "${paths[@]}"; do
        file=$output/$engine.$(tr / . <<<"$path").xml
        [ ! -e "$file" ] || continue
        (cd "$directory" && timeout "${SUITE_TIMEOUT:-600}" "$python" -P -m pytest -q -p no:cacheprovider \
            -W ignore --continue-on-collection-errors "${select[@]}" --junitxml="$file" "$@" "$path") >"${file%.xml}.log" 2>&1 || true
        [ -e "$file" ] || echo "$engine: $path did not finish; see ${file%.xml}.log" >&2
    done
}

paths=("$@")
run "$theirs"
PYTEST_ADDOPTS="${PYTEST_ADDOPTS:-} -p with_back_end" run ours

"$python" - "$output" "$theirs" <<'PYTHON'
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

output, engine = Path(sys.argv[1]), sys.argv[2]


def outcomes(engine):
    found = {}
    for file in output.glob(f"{engine}.*.xml"):
        for case in ElementTree.parse(file).iter("testcase"):
            failed = case.find("failure") is not None or case.find("error") is not None
            skipped = case.find("skipped") is not None
            name = f"{case.get('classname')}::{case.get('name')}"
            found[name] = "failed" if failed else "skipped" if skipped else "passed"
    return found


theirs, ours = outcomes(engine), outcomes("ours")
for title, found in ((engine, theirs), ("this back end", ours)):
    counts = {kind: sum(o == kind for o in found.values()) for kind in ("passed", "failed", "skipped")}
    print(f"{title}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
worse = sorted(name for name, outcome in theirs.items() if outcome == "passed" and ours.get(name) != "passed")
for name in worse:
    print(f"passes with {engine}, {ours.get(name, 'missing')} with this back end: {name}")

loops = [loop for file in output.glob("report.*.json") for loop in json.loads(file.read_text())["loops"]]
for title, chosen in (
    ("loops", loops),
    ("loops with a local kernel", [loop for loop in loops if loop["name"] != "assignment"]),
):
    calls, lowered = (sum(loop[key] for loop in chosen) for key in ("calls", "lowered"))
    print(f"{title}: {lowered} of {calls} calls lowered ({lowered / calls if calls else 1:.1%})")
reasons = {}
for loop in loops:
    if loop["lowered"] < loop["calls"] and loop["name"] != "assignment":
        reasons.setdefault(loop["reason"], [0, loop["name"]])[0] += loop["calls"] - loop["lowered"]
for reason, (calls, name) in sorted(reasons.items(), key=lambda item: -item[1][0]):
    print(f"  {calls} calls ran on {engine} ({name}): {reason}")
print(f"output: {output}")
sys.exit(bool(worse))
PYTHON
