"""The proof as one command: crash matrix, chaos on both brokers, planted bugs."""
