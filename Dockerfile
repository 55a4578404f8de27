# tcore in a container. CPU:   docker build --tag tcore .
#                       CUDA:  docker build --tag tcore --build-arg COMPUTE=cu130 .
# Use it:  docker run --rm --user "$(id -u)" --volume "$PWD:/data" tcore propagate default clip.mp4 --labels first.png
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# cpu, or a build of torch for CUDA such as cu130, which brings its own CUDA libraries.
ARG COMPUTE=cpu
ARG TORCH=2.13.0

WORKDIR /opt/tcore
# torch alone first: its layer, by far the largest, outlives changes of the code.
RUN pip install --no-cache-dir "uv>=0.9,<1" \
    && uv pip install --system --no-cache --torch-backend "${COMPUTE}" "torch==${TORCH}"
COPY pyproject.toml README.md LICENSE ./
COPY tcore ./tcore
RUN uv pip install --system --no-cache . && useradd --create-home --uid 1000 tcore

USER 1000
WORKDIR /data
ENTRYPOINT ["tcore"]
CMD ["--help"]
