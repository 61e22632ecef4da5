# Install what `python -m bench.gpu.pack` has put into a folder, without a network, for this bash and its programs:  . bench/gpu/setup.sh FOLDER
# Wheels go to a temporary folder, which PYTHONPATH names; the codec goes into the checkout, whose own code is what runs.
gpu_site="${TMPDIR:-/tmp}/flowtrain-site" gpu_wheels="$1/wheels"
if [ -d "$1/parts" ]; then
    gpu_wheels="$gpu_site.wheels"
    mkdir -p "$gpu_wheels" && cat "$1"/parts/part-* | tar x -C "$gpu_wheels" || return
fi
python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --upgrade \
    --target "$gpu_site" "$gpu_wheels"/*.whl || return
if [ -d flowtrain ]; then cp "$gpu_site"/flowtrain/_delta.*.so flowtrain/; fi
export PYTHONPATH="$gpu_site${PYTHONPATH:+:$PYTHONPATH}" FLOWTRAIN_COMMIT="$(cat "$1/commit")"
