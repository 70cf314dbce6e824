"""The app with durable tasks."""
