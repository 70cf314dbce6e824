"""The app of tests/support/apps.py in a worker that waits for its tasks for a while on SIGQUIT."""

from tests.support.apps import build

tasks = build()
app, durable = tasks.app, tasks.durable
app.conf.worker_soft_shutdown_timeout = 3.0
