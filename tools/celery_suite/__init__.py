"""Celery's own integration tests, run as they are and with every task durable; `python3 dev.py celery-suite`."""
