# An image of `swarm`, for the CPU. See docs/how-to/containers.md.
#   docker build --tag swarm_plugins .
#   docker build --tag swarm_plugins --build-arg TORCH_INDEX= .    (PyPI's torch, which runs on CUDA)
ARG BASE=python:3.11-slim

FROM ${BASE} AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
# Asked in addition to PyPI, whose builds come with CUDA and take some GB more.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1

# What is large and changes least comes first: torch, then the other packages, then this one.
WORKDIR /tmp/build
COPY constraints.txt .
RUN PIP_EXTRA_INDEX_URL="$TORCH_INDEX" pip install --constraint constraints.txt torch
COPY pyproject.toml .
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
      extras = [project['optional-dependencies'][extra] for extra in ('web', 'metrics')]; \
      print(*project['dependencies'], *sum(extras, []), sep='\n')" > requirements.txt \
    && pip install --constraint constraints.txt --requirement requirements.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl

# The user owns the secrets that are mounted: only their owner can read them.
ARG USER_ID=1000
# /var/lib/swarm: identities and points; .cache: models of the Hub. Both are for volumes.
RUN useradd --non-unique --uid "$USER_ID" --create-home swarm \
    && install --directory --owner swarm --group swarm /var/lib/swarm /home/swarm/.cache
USER ${USER_ID}
ENV HOME=/home/swarm
WORKDIR /home/swarm

# Healthy: HEALTH_URL answers, and with HEALTH_TEXT in it. A first start may download a model for a while.
HEALTHCHECK --interval=30s --timeout=10s --start-period=30m --start-interval=5s \
  CMD ["python", "-c", "import os, sys, urllib.request as web; url = os.environ.get('HEALTH_URL'); sys.exit(bool(url) and os.environ.get('HEALTH_TEXT', '') not in web.urlopen(url, timeout=5).read().decode())"]
ENTRYPOINT ["swarm"]
CMD ["--help"]
