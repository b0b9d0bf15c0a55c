"""The feedback gateway: HTTP in, `user-feedback` out, acknowledged once it is durable."""
