"""A small Celery app before and after it became durable; docs/how-to/adopt.md goes from the one to the other."""
