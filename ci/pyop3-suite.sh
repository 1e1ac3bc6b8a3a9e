#!/usr/bin/env bash
# Run the tests of pyop3 and of Firedrake on it twice, with loopy and with this back end, and compare.
#
#   ci/pyop3-suite.sh DIR [PATH...]
#
# DIR is a checkout of Firedrake's branch with pyop3; everything else is as in ci/firedrake-suite.sh.
set -euo pipefail
[ $# -ge 1 ] && [ -d "$1/pyop3" ] || {
    echo "usage: ci/pyop3-suite.sh DIR [PATH...] where DIR holds pyop3/ and tests/" >&2
    exit 2
}
exec "$(dirname "${BASH_SOURCE[0]}")/firedrake-suite.sh" "$@"
