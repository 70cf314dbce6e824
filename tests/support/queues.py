"""Names that test processes and worker processes share."""

QUEUE = "umt-tests"
