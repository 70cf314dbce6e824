"""Settings of the app in umt_durable.app, for `celery -A umt_durable worker` started in this folder.

Nothing here names a broker or a database: with neither set, the worker starts the embedded pair. To use servers of your
own, set DURABLE_DATABASE_URL, CELERY_BROKER_URL and CELERY_RESULT_BACKEND in the environment, or write
durable_database_url, broker_url and result_backend below. An app of your own keeps its own settings, which
`umt-durable doctor` checks.
"""

# Data must never become code.
task_serializer = "json"
result_serializer = "json"
event_serializer = "json"
accept_content = ["json"]

# A worker that hoards messages keeps other workers idle; what it had is found again only after its lease has ended.
worker_prefetch_multiplier = 1

# Go on trying while the broker is away, at the start too: runs wait in Postgres in the meantime.
broker_connection_retry_on_startup = True
broker_connection_max_retries = None

# A chord whose header member sleeps longer than this never runs its body. 0 keeps it as long as it takes; the default
# of Celery is one day.
result_chord_expires = 0

# Flower shows runs from these.
worker_send_task_events = True
