"""Small applications that use umt_durable the way a project of your own would."""
