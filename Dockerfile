# Image of the worker, of Flower and of the command line in docker-compose.yml.
FROM python:3.12-slim

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /app

COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY umt_durable umt_durable
COPY migrations migrations
RUN pip install -c constraints.txt ".[flower]" && rm -rf umt_durable migrations

COPY celeryconfig.py ./
RUN useradd --create-home --uid 10001 durable
USER durable

CMD ["celery", "-A", "umt_durable", "worker", "--loglevel", "INFO"]
