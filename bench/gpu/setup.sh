# What `python -m bench.gpu.pack` has packed, for this shell and its programs, without a network:  . bench/gpu/setup.sh FOLDER
# Wheels go to a temporary folder, which PYTHONPATH names; the codec is put into the checkout, whose own code is what runs.
gpu_site="${TMPDIR:-/tmp}/flowtrain-site"
mkdir -p "$gpu_site"
if [ -d "$1/parts" ]; then mkdir -p "$gpu_site.wheels" && cat "$1"/parts/part-* | tar x -C "$gpu_site.wheels"; else gpu_site_wheels="$1/wheels"; fi
python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --upgrade \
    --target "$gpu_site" "${gpu_site_wheels:-$gpu_site.wheels}"/*.whl
if [ -d flowtrain ]; then cp "$gpu_site"/flowtrain/_delta.*.so flowtrain/; fi
export PYTHONPATH="$gpu_site${PYTHONPATH:+:$PYTHONPATH}" FLOWTRAIN_COMMIT="$(cat "$1/commit")"
