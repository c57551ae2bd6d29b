# Forerun from its wheel, without a compiler: make wheels && docker build -t forerun . && docker run -p 8000:8000 forerun
ARG BASE=python:3.11-slim
FROM $BASE
ARG TORCH="--index-url https://download.pytorch.org/whl/cpu"
RUN useradd --create-home forerun && install --directory --owner forerun /models && python3 -m venv /opt/forerun
ENV PATH=/opt/forerun/bin:$PATH
RUN pip install --no-cache-dir $TORCH "torch>=2.11"
RUN --mount=type=bind,source=dist,target=/dist \
    pip install --no-cache-dir "$(ls /dist/forerun-*-manylinux_2_28_$(uname -m).whl)[serve]"
USER forerun
ENV FORERUN_CACHE=/models HF_HOME=/models/huggingface
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=3)"
ENTRYPOINT ["forerun", "serve", "--host", "0.0.0.0"]
CMD ["--model", "forerun:target"]
