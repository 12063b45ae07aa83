# syntax=docker/dockerfile:1
# For machines with NVIDIA GPUs and the NVIDIA container toolkit:
#   docker build -t foveal .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" foveal foveal train config=…
# PyTorch's wheels bring the CUDA libraries; the base only says what the driver has to offer.

FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS base
# the compiler and Python's headers: Triton builds its launchers when a kernel is first used
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev \
    && rm -rf /var/lib/apt/lists/*

FROM base AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /opt/foveal
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/venv \
    && PIP_CONSTRAINT=/opt/foveal/constraints.txt PYTHON=/opt/venv/bin/python \
    /opt/foveal/scripts/install.sh vllm,ray,track,view,video,lowmem

FROM base
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/foveal /opt/foveal
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /work
# `ubuntu` of the base; with another `--user`, set HOME to a folder that it can write to
USER 1000:1000
CMD ["foveal", "--help"]
