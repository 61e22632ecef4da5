#!/usr/bin/env bash
# The plans of `bench.gpu`, rehearsed on a CPU: the folder that travels, and with nothing but it and the releases of the image, without a network
# where this machine lets that be, every stage in tiny shapes; that of vLLM where the environment VENV has it. The environment of the image is kept.
# PLANS="second" asks for some alone.
set -euo pipefail
cd "$(dirname "$0")/.."
cache="${XDG_CACHE_HOME:-$HOME/.cache}/flowtrain/gpu"
venv="${VENV:-.venv}"
plans=()
for plan in ${PLANS:-first second vllm}; do
    if [ "$plan" = vllm ] && ! [ -e "$venv/.vllm" ]; then echo "plan vllm: left out, there is no vLLM"; else plans+=("$plan"); fi
done
if [ ${#plans[@]} = 0 ]; then exit 0; fi
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

# The folder that travels, and the image without it.
prepare() {
    python="$("$venv/bin/python" -c 'from bench.gpu.pack import find_python; print(find_python())')"
    pins="$("$venv/bin/python" -c 'from bench.gpu.pack import PINS; print(*PINS)')"
    "$venv/bin/python" -m bench.gpu.pack --plan first --out "$folder/gpu" --python "$python"
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
    isolated=()
    if unshare --net true 2> /dev/null; then isolated=(unshare --net); fi
}

# A command with nothing but the image and the folder.
on_the_image() {
    "${isolated[@]}" env -u PYTHONDONTWRITEBYTECODE PATH="$home/bin:$PATH" TMPDIR="$folder" OMP_NUM_THREADS=1 \
        bash -euc 'ip link set lo up 2> /dev/null || true; . bench/gpu/setup.sh "$0"; "$@"' "$folder/gpu" "$@"
}

# A plan, in the first call or in one that goes on with it.
run_plan() {
    local command=(-m bench.gpu --plan "$1" --dry-run --out "$folder/$1")
    if [ "$1" = vllm ]; then OMP_NUM_THREADS=1 "$venv/bin/python" "${command[@]}"; else on_the_image python3 "${command[@]}"; fi | tee "$folder/log"
    # What broke is told apart from what only lacks a package.
    grep -q 'every stage has run' "$folder/log" && ! grep -qE ': (broken|failed|timed out) ' "$folder/log"
}

for plan in "${plans[@]}"; do
    if [ "$plan" != vllm ] && [ -z "${home:-}" ]; then
        prepare
        echo "the quickstart, from the folder alone"
        on_the_image sh -c "cd '$folder' && exec python3 -m flowtrain.train --config quickstart --model.path quickstart --train.num_steps 1 \
            --eval.num_tasks 5 --eval.at_ends false --log.tensorboard false --run.dir quickstart" > "$folder/quickstart.log" 2>&1 \
            || { tail -n 20 "$folder/quickstart.log"; exit 1; }
    fi
    echo "plan $plan"
    # A second call tries what broke once more: a stage that passes then is named above, and no reason to stop.
    run_plan "$plan" || { tail -n 40 "$folder/$plan"/*.log; run_plan "$plan"; } || { tail -n 40 "$folder/$plan"/*.log; exit 1; }
done
