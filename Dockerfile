# blend-server and blend-router, for CPUs or for CUDA. docs/deployment.md says how to run them.
#
#   docker build -t blend .                                         torch as its default build (on x86: CUDA)
#   docker build -t blend --build-arg TORCH_INDEX=URL .             another build of torch, such as that for CPUs
#   docker build -t blend:cuda --build-arg EXTRAS=mooncake,gpu .    with Triton kernels for CUDA devices
#
# Nothing secret goes in: secrets, certificates and access files are mounted when the container runs.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim-bookworm AS build
ARG TORCH_INDEX=""
ARG EXTRAS="mooncake"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/blend
ENV PATH=/opt/blend/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
# On its own first, so that nothing that needs it chooses another build.
RUN pip install -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY blend/ blend/
COPY server/ server/
RUN pip install -c constraints.txt ".[${EXTRAS}]"

FROM python:${PYTHON_VERSION}-slim-bookworm
# Mooncake is linked against libcurl, libibverbs and libnuma; torch and faiss against libgomp.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libcurl4 libgomp1 libibverbs1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 blend \
    && useradd --uid 10001 --gid blend --no-create-home --home-dir /var/lib/blend --shell /usr/sbin/nologin blend \
    && install -d -o blend -g blend -m 0700 /var/lib/blend
COPY --from=build /opt/blend /opt/blend
# All that is written at run time: models, documents, stored KV, compiled kernels.
ENV PATH=/opt/blend/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    BLEND_CACHE=/var/lib/blend \
    HF_HOME=/var/lib/blend/hub \
    NUMBA_CACHE_DIR=/var/lib/blend/numba \
    TRITON_CACHE_DIR=/var/lib/blend/triton
USER 10001:10001
WORKDIR /var/lib/blend
VOLUME /var/lib/blend
# Router, engine, residency events, and where the last of them can be asked for.
EXPOSE 50060 50061 5557 5558
STOPSIGNAL SIGTERM
# By grpc.health.v1; a service that listens elsewhere, or with TLS, says so in a healthcheck of its own.
HEALTHCHECK --interval=10s --timeout=6s --start-period=180s --retries=3 \
    CMD ["python", "-m", "blend_server.check", "127.0.0.1:50061"]
CMD ["blend-server"]
