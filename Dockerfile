# hetero-kv's server. Build it in the repository: docker build -t hetero-kv .
FROM python:3.12-slim

RUN useradd --create-home --uid 1000 hetero && mkdir /data && chown hetero /data
# cluster,documents for a node of a cluster.
ARG EXTRAS=server,documents
WORKDIR /app
COPY . .
# torch alone first: a CPU build where the index has one.
RUN pip install --no-cache-dir -c constraints.txt torch \
    && pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]" \
    && rm -rf /app
WORKDIR /data
USER 1000
# Models, contexts and uploads outlast the container in this volume.
ENV HETERO_KV_HOME=/data
VOLUME /data
EXPOSE 8080
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health')"]
# Other machines reach a container's port, so that a key is needed: docker run … hetero-kv --api_key me:SECRET-KEY
ENTRYPOINT ["hetero-kv", "serve", "--host", "0.0.0.0"]
