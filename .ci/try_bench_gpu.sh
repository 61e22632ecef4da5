#!/usr/bin/env bash
# `bench.gpu` where torch, Triton and pytest are all there is, as on a machine that lends its GPU for minutes: every stage in tiny shapes on the
# CPU, and a second call, which has nothing to do but ask for the packages that are missing.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "${TORCH:?}" "${TRITON:?}" pytest
for call in first second; do
    "$folder/venv/bin/python" -m bench.gpu --out "$folder/out" --dry-run | tee "$folder/$call.txt"
done
# What broke is told apart from what only lacks a package, or was slow on a busy machine.
if grep -E '\.\.\. (broken|failed)' "$folder/first.txt" "$folder/second.txt"; then exit 1; fi
if grep -E '^(environment|attention|losses|delta) ' "$folder/second.txt"; then exit 1; fi
grep -q '^| attention | done |' "$folder/out/report.md"
