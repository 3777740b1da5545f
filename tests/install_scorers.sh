#!/usr/bin/env bash
# Installs the benchmarks' own scorers, each into an environment of its own, and the browser that one of them draws
# equations in. What is there and up to date is kept.
#
#     tests/install_scorers.sh [TARGET] [omni] [olmocr]
#
# TARGET is where `benchmark.py --score` looks when it is left out: .scorers beside benchmark.py. PYTHON is the
# interpreter that has the project's requirements (default: python). As root, Debian's Chromium is installed when
# there is none; Playwright's own is used where it can be downloaded.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
target=${1:-$root/.scorers}
scorers=("${@:2}")
[[ ${#scorers[@]} -gt 0 ]] || scorers=(omni olmocr)

if [[ " ${scorers[*]} " == *" olmocr "* && ! -x /usr/lib/chromium/chromium && $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
fi

mkdir -p "$target"
cd "$root"
exec "${PYTHON:-python}" - "$target" "${scorers[@]}" <<'PY'
import sys
from pathlib import Path

import benchmark

target, *names = sys.argv[1:]
for name in names:
    scorer, folder = benchmark.SCORERS[name], Path(target).resolve() / name
    try:
        if not benchmark.up_to_date(scorer, benchmark.environment_python(folder)):
            benchmark.install_scorer(scorer, folder)
    except benchmark.ScorerError as e:
        sys.exit(f"{scorer.package}: {e}")
    print(f"{scorer.package} {scorer.version}: {benchmark.environment_python(folder)}")
PY
