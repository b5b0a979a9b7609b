# The toolkit in an image, with the versions that its tests have passed with. For CPUs, or with another TORCH for GPUs:
#     docker build -t nmt .
#     docker build -t nmt --build-arg TORCH=cu130 .
# docs/distributed.md says how to run it: with --init and --stop-timeout 120, or a stop leaves no time to save.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm

# torch.compile and Triton call a C compiler at run time.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/nmt
COPY constraints.txt constraints.txt
ARG TORCH=cpu
RUN pip install --no-cache-dir --constraint constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/${TORCH} torch

COPY pyproject.toml setup.cfg LICENSE ./
COPY docs/install.md docs/install.md
COPY nmt nmt
COPY configs configs
COPY scripts/nmt-launch scripts/nmt-launch
COPY scripts/nmt-slurm scripts/nmt-slurm
RUN pip install --no-cache-dir --constraint constraints.txt ".[cpu,hub,serve]" \
    && useradd --create-home --uid 1000 nmt

# Runs, data and caches go to the folder that is mounted here.
USER nmt
WORKDIR /work
ENTRYPOINT ["nmt-train"]
