#!/usr/bin/env bash
# Without Kubernetes: `docker run --gpus all --shm-size 1g -p 8000:8000 -v MODELS:/models headroom:0.1.0 model=/models/NAME`
# serves with those options; any other command runs as it is. KubeRay starts Ray by its own command and never comes here.
set -euo pipefail
if [[ ${1:-} == *=* ]]; then
  # The container's own address: 127.0.0.1 would answer nobody outside it.
  export RAY_SERVE_DEFAULT_HTTP_HOST=0.0.0.0
  exec serve run serve_app:app "$@"
fi
exec "$@"
