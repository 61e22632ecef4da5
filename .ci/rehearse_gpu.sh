#!/usr/bin/env bash
# The plans of `bench.gpu`, rehearsed on a CPU: the folder that travels, and with nothing but it and the releases of the image, without a network
# where this machine lets that be, every stage in tiny shapes. The environment is kept. Where no file that the plans touch has changed since a
# rehearsal passed here, there is none, and it says so; FORCE=1 asks for one.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$(.venv/bin/python -c 'from bench.gpu.pack import find_python; print(find_python())')"
pins="$(.venv/bin/python -c 'from bench.gpu.pack import PINS; print(*PINS)')"
cache="${XDG_CACHE_HOME:-$HOME/.cache}/flowtrain/gpu"
touched=(bench kernels csrc flowtrain/training flowtrain/weights flowtrain/engines flowtrain/run pyproject.toml .ci/rehearse_gpu.sh)
state="$({ git ls-files -s "${touched[@]}"; git diff HEAD -- "${touched[@]}"; } | sha256sum | cut -c1-16)"
if [ -e "$cache/passed-$state" ] && [ -z "${FORCE:-}" ]; then echo "rehearsal of the GPU's plans: left out, nothing that they touch has changed"; exit 0; fi
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
.venv/bin/python -m bench.gpu.pack --plan first --out "$folder/gpu" --python "$python"
home="$cache/$({ echo "$python $pins"; cat "$folder/gpu/present.txt"; } | sha256sum | cut -c1-16)"
if [ ! -e "$home/.done" ]; then
    echo "$pins, as the image has them -> $home"
    "$python" -m venv --clear "$home"
    # Triton 3.6's interpreter, which stands in for a GPU here, does not know the image's numpy.
    # shellcheck disable=SC2086  # several words
    "$home/bin/pip" install --quiet --no-compile $pins 'numpy<2.4' -r "$folder/gpu/present.txt" pytest hypothesis
    # pip brought some of these for others; the image lacks them.
    ls "$folder/gpu/wheels" | sed 's/-.*//' | xargs "$home/bin/pip" uninstall --quiet --yes 2> /dev/null
    touch "$home/.done"
fi
cat > "$folder/run.sh" <<INNER
set -eu
ip link set lo up 2> /dev/null || true
export PATH="$home/bin:\$PATH" TMPDIR="$folder" OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE
. bench/gpu/setup.sh "$folder/gpu"
(cd "$folder" && echo "the quickstart, from the folder alone" && python3 -m flowtrain.train --config quickstart --model.path quickstart \
    --train.num_steps 1 --eval.num_tasks 5 --eval.at_ends false --log.tensorboard false --run.dir quickstart > quickstart.log 2>&1) \
    || { tail -20 "$folder/quickstart.log"; exit 1; }
for plan in ${PLANS:-first second}; do echo "plan \$plan"; python3 -m bench.gpu --plan \$plan --dry-run --out "$folder/\$plan" | tee "$folder/\$plan.txt"; done
INNER
isolated=()
unshare --net true 2> /dev/null && isolated=(unshare --net)
"${isolated[@]}" bash "$folder/run.sh"
# What broke is told apart from what only lacks a package.
if grep -E ': (broken|failed|timed out) ' "$folder"/*.txt; then tail -n 20 "$folder"/*/*.log; exit 1; fi
mkdir -p "$cache" && rm -f "$cache"/passed-* && touch "$cache/passed-$state"
