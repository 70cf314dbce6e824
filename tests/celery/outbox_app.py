"""The tests' app with routes for the events `tests.valued` and `tests.noted`; tests.support.apps itself has none."""

from __future__ import annotations

from tests.support import apps

tasks = apps.build()
tasks.durable.outbox.route("tests.valued", tasks.one_step)
tasks.durable.outbox.route("tests.noted", tasks.note)
app = tasks.app
