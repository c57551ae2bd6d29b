# An image with compiled kernels and without a compiler: docker build -t forerun . && docker run -p 8000:8000 forerun
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /forerun
COPY . .
RUN python -m venv .venv && .venv/bin/pip install --no-cache-dir "torch>=2.11,<2.14" --index-url https://download.pytorch.org/whl/cpu \
    && .venv/bin/pip install --no-cache-dir ".[compiler]" build auditwheel && make wheels PLATFORMS=manylinux_2_28_x86_64

FROM python:3.11-slim
RUN useradd --create-home forerun && install --directory --owner forerun /models
COPY --from=build /forerun/dist /dist
RUN pip install --no-cache-dir "torch>=2.11,<2.14" --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir "$(ls /dist/forerun-*-manylinux_2_28_x86_64.whl)[serve]" && rm -r /dist
USER forerun
ENV FORERUN_CACHE=/models HF_HOME=/models/huggingface
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=3)"
ENTRYPOINT ["forerun", "serve", "--host", "0.0.0.0"]
CMD ["--model", "forerun:target"]
