"""What acts on the last event: trainer, snapshot publisher and store, fleet subscriber, evaluator, auditor."""
