"""Tests of what Celery's worker does with durable tasks, in real worker processes on real brokers."""
