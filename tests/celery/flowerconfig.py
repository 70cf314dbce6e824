"""The configuration of the Flower process that the tests start."""

from umt_durable.bridge.flower import format_task as format_task
